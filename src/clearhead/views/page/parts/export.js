// What is shown, as a file: PNG, SVG or CSV, made here and handed over without any network.

import { element } from "../base/dom.js";
import { colourAt, css, palette, place } from "../base/palette.js";
import { sentence } from "../base/text.js";
import { contextOf, inkOf, paintMap, paintMarks } from "./paint.js";
import { headWords } from "./question.js";
import { BLOCKED, BROKEN, HIDDEN, VALUE, largestOfRow, pixelStart } from "./raster.js";

const SVG = "http://www.w3.org/2000/svg";
const TITLE = 34;

/** @typedef {import("./map.js").MapView} MapView */

/**
 * @param {Blob} blob
 * @param {string} name
 */
export function save(blob, name) {
  const url = URL.createObjectURL(blob);
  const link = element("a", { href: url, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

/** @param {import("../base/state.js").Model} model */
export function titleOf(model) {
  const { side } = model.state;
  const { query, source } = model.pair;
  const pair = source === null ? "" : `, query ${query} → source ${source}`;
  return `${sentence(model.header.title, 60)}: ${headWords(model)}${side === "this" ? "" : ` (${side})`}${pair}`;
}

/** @param {import("../base/state.js").Model} model @param {string} ending */
export function fileName(model, ending) {
  return `attention-${model.headName(model.state.entry, model.state.head)}.${ending}`;
}

/** @param {MapView} map @param {boolean} dark @returns {Promise<Blob>} */
export function toPng(map, dark) {
  const { frame, raster, model } = map;
  if (!frame || !raster) throw new Error("nothing is drawn");
  const ink = inkOf(map.root);
  const canvas = element("canvas", { width: Math.ceil(2 * (frame.left + frame.width + 12)), height: Math.ceil(2 * (frame.top + frame.height + TITLE + 12)) });
  const context = contextOf(canvas);
  context.fillStyle = ink.paper;
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.scale(2, 2);
  context.fillStyle = ink.text;
  context.font = `600 13px ${ink.font}`;
  context.fillText(titleOf(model), 10, 20, frame.left + frame.width - 10);
  context.translate(0, TITLE);
  paintMap(context, frame, raster, model, dark, ink);
  paintMarks(context, frame, model, ink);
  return new Promise((resolve, reject) => canvas.toBlob((blob) => (blob ? resolve(blob) : reject(new Error("no picture"))), "image/png"));
}

/**
 * @param {string} name
 * @param {Record<string, string | number>} attributes
 * @param {...(Node | string)} children
 */
function svgElement(name, attributes, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, String(value));
  made.append(...children);
  return made;
}

/** @param {MapView} map @param {boolean} dark @returns {Blob} */
export function toSvg(map, dark) {
  const { frame, raster, model } = map;
  if (!frame || !raster) throw new Error("nothing is drawn");
  const { left, top, width, height, region: [q0, q1, s0, s1] } = frame;
  const ink = inkOf(map.root);
  const svg = svgElement("svg", { xmlns: SVG, viewBox: `0 0 ${left + width + 12} ${top + height + TITLE + 12}`, "font-family": "sans-serif", "font-size": 11, fill: ink.text },
    svgElement("title", {}, titleOf(model)),
    svgElement("defs", {}, hatch(ink)),
    svgElement("rect", { width: "100%", height: "100%", fill: ink.paper }),
    svgElement("text", { x: 10, y: 20, "font-weight": 600, "font-size": 13 }, titleOf(model)));
  const plot = svgElement("g", { transform: `translate(${left} ${top + TITLE})`, "shape-rendering": "crispEdges" });
  plot.append(svgElement("rect", { width, height, fill: "url(#hatch)", stroke: ink.line }));
  const cells = svgCells(map, dark);
  plot.append(...cells);
  svg.append(plot);
  const labels = svgElement("g", { transform: `translate(0 ${TITLE})` });
  const down = height / (q1 - q0);
  const across = width / (s1 - s0);
  if (down >= 9) for (let q = q0; q < q1; q++) labels.append(svgElement("text", { x: left - 6, y: top + (q - q0 + 0.5) * down + 4, "text-anchor": "end" }, model.queryLabel(q, 14)));
  if (across >= 9) for (let s = s0; s < s1; s++) labels.append(svgElement("text", { transform: `translate(${left + (s - s0 + 0.5) * across} ${top - 6}) rotate(-60)` }, model.sourceLabel(s, 14)));
  svg.append(labels);
  return new Blob([new XMLSerializer().serializeToString(svg)], { type: "image/svg+xml" });
}

/** @param {import("./paint.js").Ink} ink */
function hatch(ink) {
  return svgElement("pattern", { id: "hatch", width: 7, height: 7, patternUnits: "userSpaceOnUse" },
    svgElement("path", { d: "M0 7L7 0", stroke: ink.faint, "stroke-opacity": 0.42 }));
}

/** Runs of equal colour, each a rectangle; what is blocked stays hatched.
 * @param {MapView} map
 * @param {boolean} dark
 */
function svgCells(map, dark) {
  const { columns, rows, values, states, difference, largest } = /** @type {import("./raster.js").Raster} */ (map.raster);
  const { width, height } = /** @type {import("./map.js").Frame} */ (map.frame);
  const { scale, norm } = map.model.state;
  const colours = palette(dark);
  const table = difference ? colours.diverging : colours.sequential;
  const paper = inkOf(map.root).paper;
  /** @type {Element[]} */
  const found = [];
  for (let y = 0; y < rows; y++) {
    const most = norm === "row" ? largestOfRow(/** @type {any} */ (map.raster), y) : largest;
    const colourOf = (/** @type {number} */ x) => {
      const state = states[y * columns + x];
      if (state === VALUE) return css(colourAt(table, place(values[y * columns + x], most, scale, difference)));
      return state === BLOCKED ? "" : state === BROKEN ? "#c0f" : state === HIDDEN ? "#8888" : paper;
    };
    for (let x = 0; x < columns; ) {
      const colour = colourOf(x);
      let stop = x + 1;
      while (stop < columns && colourOf(stop) === colour) stop += 1;
      if (colour) found.push(svgElement("rect", { x: ((x * width) / columns).toFixed(2), y: ((y * height) / rows).toFixed(2), width: (((stop - x) * width) / columns).toFixed(2), height: (height / rows).toFixed(2), fill: colour }));
      x = stop;
    }
  }
  return found;
}

/** The cells that are drawn, one a line. @param {MapView} map @returns {Blob} */
export function toCsv(map) {
  const { raster, model } = map;
  if (!raster) throw new Error("nothing is drawn");
  const { region: [q0, q1, s0, s1], columns, rows, values, states, detail } = raster;
  const cells = detail === "cells";
  const words = ["", "blocked", "not held", "", "hidden", "nothing left"];
  const lines = [cells ? "query,source,query_token,source_token,weight,state" : "query_start,query_stop,source_start,source_stop,weight,state"];
  for (let y = 0; y < rows; y++) {
    const top = pixelStart(y, rows, q0, q1);
    for (let x = 0; x < columns; x++) {
      const left = pixelStart(x, columns, s0, s1);
      const i = y * columns + x;
      const value = states[i] === VALUE ? String(values[i]) : states[i] === BROKEN ? "NaN" : "";
      const place = cells
        ? [top, left, quoted(model.queryLabel(top, 200)), quoted(model.sourceLabel(left, 200))]
        : [top, Math.max(top + 1, pixelStart(y + 1, rows, q0, q1)), left, Math.max(left + 1, pixelStart(x + 1, columns, s0, s1))];
      if (states[i] !== BLOCKED || cells) lines.push([...place, value, words[states[i]]].join(","));
    }
  }
  return new Blob(["\ufeff", lines.join("\r\n"), "\r\n"], { type: "text/csv" });
}

/** A cell that no spreadsheet takes for a formula. @param {string} text */
function quoted(text) {
  const safe = /^[=+\-@]/.test(text) ? `'${text}` : text;
  return `"${safe.replaceAll('"', '""')}"`;
}
