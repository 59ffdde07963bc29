// The choices above and beside the map, search, help and the theme.

import { button, choice, element, fill } from "../base/dom.js";
import { ALLOWED, colourAt, css, palette } from "../base/palette.js";
import { number, sentence, visible } from "../base/text.js";
import { fileName, save, toCsv, toPng, toSvg } from "./export.js";
import { contextOf, inkOf, patternOf } from "./paint.js";
import { BARE, BLOCKED, BROKEN, HIDDEN, UNHELD } from "./raster.js";

/** @typedef {import("../base/state.js").Model} Model */

/** Which layer, head, sample and record. @param {Model} model @param {HTMLElement} root */
export function buildChoices(model, root) {
  const { header, state, entry } = model;
  const layers = header.layers.map((one, e) => /** @type {[string, string]} */ ([
    String(e), `${one.layer}${one.call > 0 ? ` (call ${one.call})` : ""}${one.kind === "cross" ? " · cross" : ""}${one.module ? ` · ${visible(one.module, 40)}` : ""}`,
  ]));
  const heads = entry.heads.map((n, h) => /** @type {[string, string]} */ ([String(h), String(n)]));
  if (heads.length > 1) heads.unshift(["-1", `mean of ${heads.length}`]);
  const samples = Array.from({ length: header.samples }, (_, s) => /** @type {[string, string]} */ ([String(s), String(s)]));
  const other = header.other;
  const isMask = header.kind === "mask";
  fill(
    root,
    isMask && layers.length === 1 ? null : choice("Layer", layers, String(state.entry), (e) => model.set({ entry: Number(e) }), { class: "wide" }),
    isMask ? null : choice("Head", heads, String(entry.heads.length > 1 ? state.head : 0), (h) => model.set({ head: Number(h) })),
    header.samples > 1 ? choice("Sample", samples, String(state.sample), (s) => model.set({ sample: Number(s) })) : null,
    other && !model.comparable ? element("p", { class: "under" }, "The other record has no such layer with these heads and positions.") : null,
    other && model.comparable
      ? choice("Record", [["this", sentence(other.name, 40)], ["other", sentence(other.other_name, 40)], ["difference", "difference"]], state.side,
          (side) => model.set({ side: /** @type {any} */ (side) }))
      : null,
  );
}

/** How the map is coloured, and what can be taken along.
 * @param {import("./map.js").MapView} map
 * @param {() => boolean} dark
 * @param {HTMLElement} root
 */
export function buildMapTools(map, dark, root) {
  const { model } = map;
  const { state, entry } = model;
  const isMask = model.header.kind === "mask";
  const copy = async () => {
    const blob = await toPng(map, dark());
    try {
      await navigator.clipboard.write([new ClipboardItem({ "image/png": blob })]);
      map.root.dispatchEvent(new CustomEvent("said", { detail: "Copied the picture." }));
    } catch {
      save(blob, fileName(model, "png"));
    }
  };
  const zoomed = element("span", { class: "buttons", role: "group", "aria-label": "Zoom" },
    button("−", () => map.zoom(2), { "aria-label": "Zoom out", title: "Zoom out (−)" }),
    button("+", () => map.zoom(0.5), { "aria-label": "Zoom in", title: "Zoom in (+)" }),
    button("Fit", () => model.set({ zoom: null }), { title: "Show the whole map (0)" }));
  const saves = element("span", { class: "buttons", role: "group", "aria-label": "Save what is shown" },
    button("Copy", () => void copy(), { title: "Copy as PNG" }),
    button("PNG", async () => save(await toPng(map, dark()), fileName(model, "png")), { title: "Save as PNG" }),
    button("SVG", () => save(toSvg(map, dark()), fileName(model, "svg")), { title: "Save as SVG" }),
    button("CSV", () => save(toCsv(map), fileName(model, "csv")), { title: "Save as CSV" }));
  const set = (/** @type {string} */ key) => (/** @type {string} */ value) => model.set(/** @type {any} */ ({ [key]: value }));
  fill(root,
    isMask ? null : [
      choice("Scale", [["linear", "linear"], ["sqrt", "square root"], ["log", "log"]], state.scale, set("scale")),
      choice("Against", [["map", "the whole map"], ["row", "each row"]], state.norm, set("norm")),
      choice("Groups", [["max", "largest"], ["mean", "mean"]], state.overview, set("overview")),
      choice("Hide", [["none", "no source"], ["1", "first source"], ["4", "first 4 sources"], ["chosen", "locked source"]], state.hide, set("hide")),
      state.hide === "none" ? null : choice("Rows", [["kept", "stay as they are"], ["scaled", "sum to 1 again"]], model.wholeRows ? state.rows : "kept", set("rows"),
        { disabled: !model.wholeRows, title: model.wholeRows ? "What becomes of the weights beside hidden sources" : "Only rows that are held whole can be scaled" }),
    ],
    entry.queries * entry.sources > 16 ? zoomed : null, saves);
}

/** What the colours and patterns mean.
 * @param {import("./map.js").MapView} map
 * @param {boolean} dark
 * @param {HTMLElement} root
 */
export function buildLegend(map, dark, root) {
  const { raster, model } = map;
  if (!raster) return;
  const { scale, norm } = model.state;
  const { difference, largest, detail, states } = raster;
  const colours = palette(dark);
  const table = difference ? colours.diverging : colours.sequential;
  const isMask = model.header.kind === "mask";
  const bar = element("canvas", { width: 128, height: 10, "aria-hidden": "true", class: "bar-of-colours" });
  const context = contextOf(bar);
  for (let x = 0; x < 128; x++) {
    context.fillStyle = css(colourAt(table, (isMask ? ALLOWED : 1) * x / 127));
    context.fillRect(x, 0, 1, 10);
  }
  const top = norm === "row" ? "largest of the row" : number(largest);
  const groups = { cells: "each cell is one weight", groups: `each pixel is the ${difference ? "mean" : model.state.overview === "max" ? "largest" : "mean"} of a group of weights`,
    blocks: `overview: ${model.state.overview === "max" ? "largest" : "mean"} weight of each block; zoom in for single weights` }[detail];
  const swatch = (/** @type {number} */ state, /** @type {string} */ words) => {
    if (!states.includes(state)) return null;
    const box = element("canvas", { width: 22, height: 12, class: "swatch", "aria-hidden": "true" });
    const draw = contextOf(box);
    draw.fillStyle = patternOf(draw, state, inkOf(map.root));
    draw.fillRect(0, 0, 22, 12);
    return element("span", { class: "key" }, box, words);
  };
  const top16 = model.entry.top;
  fill(root,
    isMask ? null : element("span", { class: "key" }, difference ? (norm === "row" ? "−" : number(-largest)) : "0", bar, `${top} (${scale === "sqrt" ? "square root" : scale})`),
    isMask && detail !== "cells" ? element("span", { class: "key" }, "0", bar, `1: share of the edges that are allowed`) : null,
    isMask && detail === "cells" ? element("span", { class: "key" }, solid(css(colourAt(table, ALLOWED))), "allowed") : null,
    swatch(BLOCKED, "blocked by the mask"),
    swatch(UNHELD, top16 ? `not among the ${top16} largest of its row` : "not held"),
    swatch(BROKEN, "NaN"), swatch(HIDDEN, model.leftOut().size ? "hidden; the other weights of a row sum to 1 again" : "hidden; the other weights stay as they are"),
    swatch(BARE, "nothing is left of the row"),
    isMask ? null : element("span", { class: "key" }, groups));
}

/** @param {string} colour */
function solid(colour) {
  const box = element("span", { class: "swatch solid" });
  box.style.backgroundColor = colour;
  return box;
}

/** Finds tokens. @param {Model} model @param {(pair: import("../base/state.js").Pair) => void} found */
export function buildSearch(model, found) {
  const status = element("span", { class: "under", role: "status" });
  let last = { text: "", index: -1 };
  const input = element("input", { type: "search", placeholder: "token or position", "aria-label": "Search tokens" });
  const go = (/** @type {number} */ step) => {
    const hits = hitsOf(model, input.value);
    if (!hits.length) {
      status.textContent = input.value ? "not found" : "";
      return;
    }
    const index = input.value === last.text ? (last.index + step + hits.length) % hits.length : 0;
    last = { text: input.value, index };
    status.textContent = `${index + 1} of ${hits.length}`;
    found({ query: hits[index], source: null });
  };
  input.addEventListener("input", () => { last.text = ""; status.textContent = input.value ? `${hitsOf(model, input.value).length} found` : ""; });
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter") go(event.shiftKey ? -1 : 1);
    else if (event.key === "Escape") input.blur();
    else return;
    event.stopPropagation();
  });
  return { root: element("label", { class: "field search" }, element("span", null, "Search"), input, status), input };
}

/** @param {Model} model @param {string} text */
function hitsOf(model, text) {
  /** @type {number[]} */
  const hits = [];
  if (!text) return hits;
  const wanted = text.toLowerCase();
  for (let q = 0; q < model.entry.queries; q++) {
    const position = model.positionOf(q);
    const raw = model.rawLabel(model.entry.query_axis, position);
    if (String(position) === text || raw?.slice(0, 4000).toLowerCase().includes(wanted)) hits.push(q);
  }
  return hits;
}

const KEYS = [
  ["?", "this help"], ["/", "search tokens"], ["Esc", "free what is locked"], ["j, k", "next, previous query"],
  ["[ ]", "previous, next head"], ["{ }", "previous, next layer"], ["m", "mean of the heads"], ["t", "light or dark"],
  ["Tab", "strip, map, lists, heads"], ["arrows", "move in the strip and in the map"], ["Enter", "lock what is shown"], ["Shift", "with a click or Enter: choose a source in the text"], ["+ − 0", "zoom the map in, out, whole"],
];

export function buildHelp() {
  const dialog = element("dialog", { "aria-labelledby": "help-title" });
  fill(dialog,
    element("h2", { id: "help-title" }, "How to read this page"),
    element("p", null, "Choose a query: a token in the text, or a row of the map. The lists say where it looks and who looks at it. Hovering previews; a click locks; Esc frees. Rows of a map are queries (they read), columns are sources (they are read)."),
    element("p", null, "Blocked cells are hatched: the mask does not allow them, which is not the same as a weight of zero. A weight says what a head reads, not what difference it makes."),
    element("dl", { class: "keys" }, KEYS.map(([key, words]) => [element("dt", null, element("kbd", null, key)), element("dd", null, words)])),
    button("Close", () => dialog.close(), { class: "primary" }));
  return dialog;
}
