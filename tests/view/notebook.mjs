// Opens notebooks in a browser and reports what their outputs show: jobs come as JSON on the
// standard input, each with an address, what is run first and what is read; results go out as JSON.

import { readFileSync } from "node:fs";
import { chromium } from "playwright-core";

const { executable, jobs } = JSON.parse(readFileSync(0, "utf8"));
const browser = await chromium.launch({ executablePath: executable, args: ["--no-sandbox", "--disable-gpu"] });
const results = {};
for (const job of jobs) {
  const page = await browser.newPage({ viewport: { width: 1280, height: 1600 } });
  const dialogs = [];
  page.on("dialog", (dialog) => { dialogs.push(dialog.message()); void dialog.dismiss(); });
  try {
    await page.goto(job.address);
    if (job.lab) await runAll(page);
    const shown = {};
    for (const [name, { frame, selector }] of Object.entries(job.reads)) {
      const root = frame ? page.frameLocator(frame).first() : page;
      const found = root.locator(selector).first();
      await found.waitFor({ state: "attached", timeout: 90_000 });
      await found.filter({ hasText: /\S/ }).waitFor({ state: "attached", timeout: 30_000 });
      shown[name] = await found.innerText();
    }
    if (job.screenshot) await page.screenshot({ path: job.screenshot, fullPage: true });
    const ran = await page.evaluate(() => "ran" in window);
    results[job.name] = { shown, dialogs, ran };
  } catch (error) {
    if (job.screenshot) await page.screenshot({ path: job.screenshot });
    results[job.name] = { failed: `${error.message}\n${error.stack}`, dialogs };
  }
  await page.close();
}
await browser.close();
process.stdout.write(JSON.stringify(results));

/** @param {import("playwright-core").Page} page */
async function runAll(page) {
  await page.locator(".jp-Notebook .jp-Cell").first().waitFor({ timeout: 90_000 });
  await page.getByText("| Idle").first().waitFor({ timeout: 90_000 });
  await page.getByRole("menuitem", { name: "Run", exact: true }).click();
  await page.getByRole("menuitem", { name: "Run All Cells", exact: true }).click();
}
