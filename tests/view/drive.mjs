// Opens pages in one browser and reports what was seen: jobs come as JSON on the standard input,
// each with a name, a file or an address, and a check of checks.mjs; results go as JSON to the standard output.

import { readFileSync } from "node:fs";
import { chromium } from "playwright-core";
import * as checks from "./checks.mjs";

const { executable, jobs } = JSON.parse(readFileSync(0, "utf8"));
const browser = await chromium.launch({
  executablePath: executable,
  args: [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--enable-precise-memory-info",
  ],
});
const results = {};
for (const job of jobs) {
  const page = await browser.newPage({
    viewport: { width: job.width ?? 1280, height: job.height ?? 900 },
    colorScheme: job.dark ? "dark" : "light", deviceScaleFactor: 1,
  });
  const seen = { errors: [], requests: [], dialogs: [] };
  page.on("console", (message) => message.type() === "error" && seen.errors.push(message.text()));
  page.on("pageerror", (error) => seen.errors.push(`${error.message}\n${error.stack}`));
  page.on("request", (request) => {
    if (!/^(file|blob|data):/.test(request.url())) seen.requests.push(request.url());
  });
  page.on("dialog", (dialog) => {
    seen.dialogs.push(dialog.message());
    void dialog.dismiss();
  });
  try {
    await page.addInitScript(checks.observe);
    await page.goto(`${job.url ?? `file://${job.file}`}${job.hash ?? ""}`);
    results[job.name] = { ...seen, value: await checks[job.check](page, job) };
  } catch (error) {
    results[job.name] = { ...seen, failed: `${error.message}\n${error.stack}` };
  }
  await page.close();
}
await browser.close();
process.stdout.write(JSON.stringify(results));
