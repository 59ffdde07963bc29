// What a reader sees and does on a page; each check returns plain data, which pytest judges.

import { readFileSync } from "node:fs";
import { createRequire } from "node:module";

const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");

/** Runs before the page's own script: when the first map is painted, and which tasks are long. */
export function observe() {
  window.seen = { long: [], painted: null, ran: false };
  new PerformanceObserver((list) => {
    for (const { startTime, duration } of list.getEntries()) window.seen.long.push([startTime, duration]);
  }).observe({ entryTypes: ["longtask"] });
  const poll = () => {
    const canvas = document.getElementById("clearhead")?.shadowRoot?.querySelector(".plot canvas");
    if (canvas?.style.width) window.seen.painted = performance.now();
    else requestAnimationFrame(poll);
  };
  requestAnimationFrame(poll);
  window.edges = () => {
    const [left, top, width, height] = window.shadow().querySelector(".over").dataset.frame.split(" ").map(Number);
    return { left, top, width, height };
  };
  window.shadow = () => document.getElementById("clearhead").shadowRoot;
}

const painted = (page) => page.waitForFunction(() => window.seen.painted, null, { timeout: 60000 });
const settle = async (page) => {
  await page.evaluate(() => new Promise((done) => requestAnimationFrame(() => setTimeout(done, 120))));
};
const text = (page, selector) =>
  page.evaluate((s) => window.shadow().querySelector(s)?.textContent ?? null, selector);

const table = (page, index) =>
  page.evaluate((i) => {
    const card = window.shadow().querySelectorAll(".question")[i];
    return {
      title: card.querySelector("h2")?.textContent, under: card.querySelector(".under")?.textContent,
      rest: card.querySelector(".rest")?.textContent ?? card.querySelector(".said")?.textContent ?? null,
      rows: [...card.querySelectorAll("tbody tr")].map((row) => [
        Number(row.querySelector(".position").textContent), row.querySelector(".pick").textContent,
        row.querySelector(".weight .number").textContent, row.querySelector("td.number")?.textContent ?? null,
      ]),
    };
  }, index);

async function download(page, name) {
  const [got] = await Promise.all([
    page.waitForEvent("download"),
    page.evaluate((n) => [...window.shadow().querySelectorAll("button")].find((b) => b.textContent === n).click(), name),
  ]);
  return readFileSync(await got.path());
}

/** The questions, and the cells of the map as CSV. */
export async function read(page) {
  await painted(page);
  await settle(page);
  return {
    title: await text(page, "h1"), where: await table(page, 0), who: await table(page, 1),
    readout: await text(page, ".readout"), legend: await text(page, ".legend"), about: await text(page, ".about"),
    heads: await page.evaluate(() => [...window.shadow().querySelectorAll(".head-name")].map((n) => n.textContent)),
    csv: (await download(page, "CSV")).toString("utf8"),
    page: await page.evaluate(() => window.shadow().textContent),
    wide: await page.evaluate(() => document.documentElement.scrollWidth - innerWidth),
  };
}

/** Whether the text of a page that draws no map can be read. */
export async function words(page) {
  await page.waitForFunction(() => window.shadow()?.querySelector(".about, [role=alert]"));
  await settle(page);
  return page.evaluate(() => window.shadow().textContent);
}

export async function options(page) {
  await painted(page);
  return page.evaluate(() => [...window.shadow().querySelectorAll("nav .field")].map((field) => [
    field.firstChild.textContent, [...field.querySelectorAll("option")].map((o) => o.textContent),
  ]));
}

/** Colours of the middle of cells on the canvas, and of a few pixels around. */
export async function colours(page, { cells, queries, sources }) {
  await painted(page);
  await settle(page);
  return page.evaluate(([cells, queries, sources]) => {
    const canvas = window.shadow().querySelector(".plot canvas");
    const context = canvas.getContext("2d");
    const { left, top, width, height } = edges();
    return cells.map(([query, source]) => {
      const x = left + ((source + 0.5) * width) / sources;
      const y = top + ((query + 0.5) * height) / queries;
      const { data } = context.getImageData(Math.round(x) - 4, Math.round(y) - 4, 8, 8);
      const found = new Set();
      for (let i = 0; i < data.length; i += 4) found.add(data.slice(i, i + 3).join());
      return [...found];
    });
  }, [cells, queries, sources]);
}

/** Hover previews, click locks, Esc frees. */
export async function pointer(page) {
  await painted(page);
  await settle(page);
  const box = await page.evaluate(() => {
    const { left, top } = window.shadow().querySelector(".over").getBoundingClientRect();
    const edge = edges();
    return { left: left + edge.left, top: top + edge.top, width: edge.width };
  });
  const at = (query, source, queries) => {
    const side = box.width / queries;
    return [box.left + (source + 0.5) * side, box.top + (query + 0.5) * side];
  };
  const said = [];
  const say = async () => { await settle(page); said.push([await text(page, ".readout"), (await table(page, 0)).title, page.url().split("#")[1] ?? ""]); };
  await page.mouse.move(...at(4, 2, 7));
  await say();
  await page.mouse.click(...at(5, 1, 7));
  await say();
  await page.mouse.move(...at(3, 0, 7));
  await say();
  await page.keyboard.press("Escape");
  await say();
  return said;
}

/** The whole tour by keyboard: from the top with Tab, without a pointer. */
export async function keyboard(page) {
  await painted(page);
  await settle(page);
  const focus = () => page.evaluate(() => {
    const e = window.shadow().activeElement;
    return e ? `${e.tagName.toLowerCase()}.${e.className}` : "";
  });
  const stops = [];
  for (let i = 0; i < 60 && !stops.some((s) => s.startsWith("button.head")); i++) {
    await page.keyboard.press("Tab");
    stops.push(await focus());
  }
  const log = { stops };
  const press = async (...keys) => { for (const key of keys) await page.keyboard.press(key); await settle(page); };
  await press("Enter");
  log.head = await text(page, ".question .under");
  await page.evaluate(() => window.shadow().querySelector(".over").focus());
  await press("ArrowUp", "ArrowUp", "ArrowLeft");
  log.moved = await text(page, ".readout");
  await press("Enter");
  log.locked = page.url().split("#")[1];
  await press("Escape", "]");
  log.freed = page.url().split("#")[1];
  await press("+");
  log.zoomed = page.url().split("#")[1];
  await press("0", "m");
  log.mean = await text(page, ".question .under");
  await press("}");
  log.layer = await text(page, ".question .under");
  await press("/");
  await page.keyboard.type("t3");
  await press("Enter");
  log.found = await text(page, ".question h2");
  await press("Escape", "Escape", "t");
  log.theme = await page.evaluate(() => window.shadow().querySelector(".page").dataset.theme);
  await press("?");
  log.help = await page.evaluate(() => window.shadow().querySelector("dialog").open);
  await press("Escape");
  log.closed = await page.evaluate(() => window.shadow().querySelector("dialog").open);
  await page.evaluate(() => window.shadow().querySelector(".tokens").focus());
  await press("Home", "ArrowRight", "Enter");
  log.strip = await text(page, ".question h2");
  return log;
}

export async function accessible(page) {
  await painted(page);
  await settle(page);
  await page.evaluate(axe);
  const { violations } = await page.evaluate(() => window.axe.run(document, { resultTypes: ["violations"] }));
  return violations.map(({ id, impact, nodes }) => ({ id, impact, nodes: nodes.slice(0, 3).map((n) => n.html.slice(0, 200)) }));
}

export async function exported(page) {
  await painted(page);
  await settle(page);
  const svg = (await download(page, "SVG")).toString("utf8");
  const parsed = await page.evaluate((t) => {
    const found = new DOMParser().parseFromString(t, "image/svg+xml");
    return { title: found.querySelector("title")?.textContent, names: [...new Set([...found.querySelectorAll("*")].map((e) => e.nodeName))], error: found.querySelector("parsererror")?.textContent ?? null };
  }, svg);
  return { title: parsed.title, svg: parsed, png: [...(await download(page, "PNG")).subarray(0, 8)], csv: (await download(page, "CSV")).toString("utf8"), ran: await page.evaluate(() => window.seen.ran) };
}

/** Times in milliseconds and memory in bytes. */
export async function speed(page) {
  await painted(page);
  const first = await page.evaluate(() => window.seen.painted);
  await page.waitForTimeout(1500);
  const hover = await page.evaluate(async () => {
    const root = window.shadow();
    const over = root.querySelector(".over");
    const box = over.getBoundingClientRect();
    const times = [];
    for (let i = 0; i < 30; i++) {
      const before = root.querySelector(".readout").textContent;
      const start = performance.now();
      over.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + 70 + i * 7, clientY: box.top + 300 + i * 9 }));
      while (root.querySelector(".readout").textContent === before && performance.now() - start < 3000) await new Promise((r) => setTimeout(r));
      times.push(performance.now() - start);
      await new Promise((r) => setTimeout(r, 30));
    }
    return times;
  });
  await page.evaluate(() => { window.seen.long = []; });
  await page.evaluate(async () => {
    const root = window.shadow();
    for (let i = 0; i < 40; i++) {
      root.querySelector(".tokens").scrollTop += 200;
      root.querySelector(".heads").scrollTop += 60;
      scrollBy(0, 50);
      await new Promise((r) => setTimeout(r, 40));
    }
  });
  const long = await page.evaluate(() => window.seen.long.map(([, duration]) => duration));
  // How slow this machine is now: a fixed amount of work, in milliseconds.
  const yardstick = await page.evaluate(() => {
    const start = performance.now();
    let sum = 0;
    for (let i = 0; i < 2e7; i++) sum += Math.sqrt(i);
    return sum ? performance.now() - start : 0;
  });
  const session = await page.context().browser().newBrowserCDPSession();
  const { processInfo } = await session.send("SystemInfo.getProcessInfo");
  const memory = processInfo.filter(({ type }) => type === "renderer").map(({ id }) =>
    1024 * Number(/RssAnon:\s+(\d+)/.exec(readFileSync(`/proc/${id}/status`, "utf8"))[1]));
  return { first, hover, long, memory: Math.max(...memory), yardstick };
}

/** Two widgets in one document, each with a kernel that answers messages. */
export async function widgets(page, { script, records }) {
  return page.evaluate(async ([text, all]) => {
    const module = await import(URL.createObjectURL(new Blob([text], { type: "text/javascript" })));
    const hosts = all.map(({ header, chunks }) => {
      let listener = () => {};
      const model = {
        get: () => header,
        on: (_, f) => { listener = f; },
        send: ({ chunk, id }) => setTimeout(() => {
          const bytes = Uint8Array.from(atob(chunks[chunk] ?? ""), (c) => c.charCodeAt(0));
          listener({ id, error: chunk in chunks ? null : "no such chunk" }, [new DataView(bytes.buffer)]);
        }),
      };
      const el = document.body.appendChild(document.createElement("div"));
      module.default.render({ model, el });
      return el;
    });
    await new Promise((r) => setTimeout(r, 1200));
    hosts[0].shadowRoot.querySelectorAll(".head")[1].click();
    await new Promise((r) => setTimeout(r, 400));
    return hosts.map((el) => [el.shadowRoot.querySelector("h1").textContent, el.shadowRoot.querySelector(".question .under").textContent]).concat([[location.hash, String(Object.keys(window).includes("mount"))]]);
  }, [script, records]);
}

/** The page in a frame that may run scripts and nothing else, as a notebook shows it. */
export async function sandboxed(page) {
  const frame = page.frames().find((f) => f !== page.mainFrame());
  await frame.waitForFunction(() => document.getElementById("clearhead")?.shadowRoot?.querySelector(".head"));
  await frame.waitForTimeout(500);
  await frame.evaluate(() => document.getElementById("clearhead").shadowRoot.querySelectorAll(".head")[2].click());
  await frame.waitForTimeout(500);
  return frame.evaluate(() => document.getElementById("clearhead").shadowRoot.querySelector(".question .under").textContent);
}

/** A picture of the page at a quarter of its size, and how far it is from the one that was kept. */
export async function looks(page, { print, kept }) {
  await painted(page);
  if (print) {
    await page.emulateMedia({ media: "print" });
    await page.evaluate(() => dispatchEvent(new Event("beforeprint")));
  }
  await page.waitForTimeout(900);
  const now = (await page.screenshot()).toString("base64");
  await page.goto("about:blank");
  return page.evaluate(async ([now, kept]) => {
    const drawn = async (data, width) => {
      const image = new Image();
      image.src = data;
      await image.decode();
      const canvas = document.createElement("canvas");
      canvas.width = width;
      canvas.height = Math.round((width * image.height) / image.width);
      const context = canvas.getContext("2d");
      context.imageSmoothingQuality = "high";
      context.drawImage(image, 0, 0, canvas.width, canvas.height);
      return canvas;
    };
    const picture = (await drawn(`data:image/png;base64,${now}`, 320)).toDataURL();
    if (!kept) return { picture, mean: null };
    const pixels = async (data) => {
      const canvas = await drawn(data, 32);
      return canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    };
    const [a, b] = [await pixels(picture), await pixels(`data:image/png;base64,${kept}`)];
    let sum = a.length === b.length ? 0 : Infinity;
    a.forEach((value, i) => { sum += Math.abs(value - b[i]); });
    return { picture, mean: sum / a.length };
  }, [now, kept ?? null]);
}

/** The mask page: what is said of an edge, and the same after keys alone. */
export async function why(page) {
  await painted(page);
  await settle(page);
  const say = () => page.evaluate(() => [...window.shadow().querySelectorAll(".question")].map((card) => [...card.querySelectorAll("h2, p, li")].map((e) => e.textContent)));
  const first = await say();
  await page.evaluate(() => window.shadow().querySelector(".over").focus());
  for (const key of ["ArrowUp", "ArrowLeft", "ArrowLeft", "Enter"]) await page.keyboard.press(key);
  await settle(page);
  const box = await page.evaluate(() => {
    const { left, top } = window.shadow().querySelector(".over").getBoundingClientRect();
    const edge = edges();
    return { left: left + edge.left, top: top + edge.top, width: edge.width, height: edge.height };
  });
  const moved = { say: await say(), hash: page.url().split("#")[1] };
  await page.keyboard.press("Escape");
  await page.mouse.move(box.left + 0.5 * box.width / 12, box.top + box.height - 4);
  await settle(page);
  return { first, moved, hovered: await say(), wide: await page.evaluate(() => document.documentElement.scrollWidth - innerWidth) };
}

/** The atlas: the order of its table, what a click on a heading does, and where a head leads. */
export async function atlas(page) {
  await page.waitForFunction(() => window.shadow()?.querySelector(".atlas td"));
  await settle(page);
  const table = () => page.evaluate(() => {
    const root = window.shadow().querySelector("details table");
    return {
      heads: [...root.querySelectorAll("tbody tr")].map((row) => row.querySelector("th").textContent),
      sorted: [...root.querySelectorAll("th[aria-sort]")].map((th) => th.getAttribute("aria-sort")),
      titles: [...root.querySelectorAll("thead th")].map((th) => th.textContent),
    };
  });
  const first = await table();
  const press = async (name, times) => {
    for (let i = 0; i < times; i++) {
      await page.evaluate((n) => [...window.shadow().querySelectorAll("details thead button")].find((b) => b.textContent.startsWith(n)).focus(), name);
      await page.keyboard.press("Enter");
      await settle(page);
    }
    return table();
  };
  const down = await press("sink", 1);
  const up = await press("sink", 1);
  await page.evaluate(() => { const select = window.shadow().querySelector("section select"); select.value = "previous"; select.dispatchEvent(new Event("change")); });
  await settle(page);
  const side = await text(page, ".atlas-side");
  await page.evaluate(() => window.shadow().querySelector("[data-head='1/2'] button").focus());
  await page.keyboard.press("Enter");
  await settle(page);
  return {
    first, down, up, side, under: await text(page, ".question .under"), readout: await text(page, ".readout"),
    chosen: await page.evaluate(() => [...window.shadow().querySelectorAll("td.chosen")].map((td) => td.textContent)),
    wide: await page.evaluate(() => document.documentElement.scrollWidth - innerWidth),
    seen: await page.evaluate(() => { const { top, bottom } = window.shadow().querySelector(".plot")?.getBoundingClientRect() ?? { top: 1e9, bottom: 1e9 }; return bottom > 0 && top < innerHeight; }),
  };
}

/** The colours from least to most, as the legend shows them. */
export async function ramp(page) {
  await painted(page);
  await settle(page);
  return page.evaluate(() => {
    const bar = window.shadow().querySelector(".bar-of-colours");
    const { data } = bar.getContext("2d").getImageData(0, 4, bar.width, 1);
    return Array.from({ length: bar.width }, (_, x) => [...data.slice(4 * x, 4 * x + 3)]);
  });
}

/** What stands in the token strip: text, classes and what is told on hover; and nodes in the page. */
export async function strip(page) {
  await painted(page);
  await settle(page);
  return page.evaluate(() => ({
    chips: [...window.shadow().querySelectorAll(".chip")].map((chip) => [chip.textContent, chip.className, chip.title, chip.firstChild.dir]),
    nodes: window.shadow().querySelectorAll("*").length,
    buttons: [...window.shadow().querySelectorAll("button")].map((b) => b.getAttribute("aria-label") ?? b.textContent),
  }));
}

/** Several fragments in one document, each on its own. */
export async function fragments(page) {
  const frames = page.frames().filter((f) => f !== page.mainFrame());
  const found = [];
  for (const frame of frames) {
    await frame.waitForFunction(() => document.getElementById("clearhead")?.shadowRoot?.querySelector(".about"));
    found.push(await frame.evaluate(() => document.getElementById("clearhead").shadowRoot.querySelector("h1").textContent));
  }
  const outside = await page.evaluate(() => [document.body.childElementCount, Object.keys(window).includes("mount")]);
  return { found, outside };
}

/** What Tab stops at, from the top of the page on, and whether Enter on the last does something. */
export async function tabs(page, { until }) {
  await page.waitForFunction(() => window.shadow()?.querySelector(".about"));
  await settle(page);
  const stops = [];
  for (let i = 0; i < 120 && !stops.some((s) => s.includes(until)); i++) {
    await page.keyboard.press("Tab");
    stops.push(await page.evaluate(() => {
      const e = window.shadow().activeElement;
      return e ? `${e.tagName.toLowerCase()}.${e.className} ${e.getAttribute("aria-label") ?? e.textContent.slice(0, 40)}` : "";
    }));
  }
  await page.keyboard.press("Enter");
  await settle(page);
  return { stops, hash: page.url().split("#")[1] ?? "" };
}
