// The pictures of a map: colours below, patterns where there is no weight, labels, and marks above.

import { element } from "../base/dom.js";
import { palette } from "../base/palette.js";
import { BARE, BLOCKED, BROKEN, HIDDEN, UNHELD, paint } from "./raster.js";

/** @typedef {import("./map.js").Frame} Frame */

// Room beside the map for the half of a number that stands over its edge.
const EDGE = 18;

/**
 * @param {HTMLCanvasElement} canvas
 * @param {Frame} frame
 * @param {number} ratio
 */
export function fit(canvas, frame, ratio) {
  const width = frame.left + frame.width + EDGE;
  const height = frame.top + frame.height + EDGE;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
}

/** @param {HTMLCanvasElement} canvas */
export function contextOf(canvas) {
  return /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
}

/** @type {Map<string, ReturnType<typeof readInk>>} */
const inks = new Map();

/** The colours of text and lines here, read once for each theme. @param {Element} root */
export function inkOf(root) {
  const theme = /** @type {HTMLElement | null} */ (root.closest(".page"))?.dataset.theme ?? "";
  let ink = inks.get(theme);
  if (!ink) inks.set(theme, (ink = readInk(root)));
  return ink;
}

/** @param {Element} root */
function readInk(root) {
  const style = getComputedStyle(root);
  const value = (/** @type {string} */ name) => style.getPropertyValue(name).trim();
  return {
    text: value("--text"), faint: value("--faint"), line: value("--line"), accent: value("--accent"),
    paper: value("--card"), font: style.fontFamily,
  };
}

/** @typedef {ReturnType<typeof inkOf>} Ink */

/**
 * @param {CanvasRenderingContext2D} context
 * @param {Frame} frame
 * @param {import("./raster.js").Raster} raster
 * @param {import("../base/state.js").Model} model
 * @param {boolean} dark
 * @param {Ink} ink
 */
export function paintMap(context, frame, raster, model, dark, ink) {
  const { left, top, width, height } = frame;
  context.fillStyle = ink.paper;
  context.fillRect(0, 0, left + width + EDGE, top + height + EDGE);
  for (const state of [BLOCKED, UNHELD, BROKEN, HIDDEN, BARE]) {
    const picture = patterned(raster, state, frame, ink);
    if (picture) context.drawImage(picture, left, top, width, height);
  }
  const { scale, norm } = model.state;
  const image = paint(raster, palette(dark), scale, norm);
  context.imageSmoothingEnabled = false;
  context.drawImage(canvasOf(image), left, top, width, height);
  context.strokeStyle = ink.line;
  context.strokeRect(left - 0.5, top - 0.5, width + 1, height + 1);
  paintLabels(context, frame, model, ink);
}

/** @param {ImageData} image */
export function canvasOf(image) {
  const canvas = element("canvas", { width: image.width, height: image.height });
  contextOf(canvas).putImageData(image, 0, 0);
  return canvas;
}

/**
 * The pixels of one state, filled with its pattern; null where there are none.
 * @param {import("./raster.js").Raster} raster
 * @param {number} state
 * @param {{width: number, height: number}} frame
 * @param {Ink} ink
 */
function patterned(raster, state, frame, ink) {
  if (!raster.states.includes(state)) return null;
  const mask = new ImageData(raster.columns, raster.rows);
  const pixels = new Uint32Array(mask.data.buffer);
  for (let i = 0; i < pixels.length; i++) if (raster.states[i] === state) pixels[i] = 0xff000000;
  const canvas = element("canvas", { width: Math.ceil(frame.width), height: Math.ceil(frame.height) });
  const context = contextOf(canvas);
  context.imageSmoothingEnabled = false;
  context.drawImage(canvasOf(mask), 0, 0, canvas.width, canvas.height);
  context.globalCompositeOperation = "source-in";
  context.fillStyle = patternOf(context, state, ink);
  context.fillRect(0, 0, canvas.width, canvas.height);
  return canvas;
}

/**
 * Blocked is hatched, not held is dotted, NaN is crossed, hidden has wide vertical stripes, and a row
 * of which nothing is left thin horizontal ones.
 * @param {CanvasRenderingContext2D} context
 * @param {number} state
 * @param {Ink} ink
 */
export function patternOf(context, state, ink) {
  const side = state === HIDDEN ? 6 : 7;
  const tile = element("canvas", { width: side, height: side });
  const draw = contextOf(tile);
  draw.strokeStyle = state === BROKEN ? ink.text : ink.faint;
  draw.fillStyle = ink.faint;
  draw.globalAlpha = state === BROKEN ? 1 : 0.42;
  draw.lineWidth = 1;
  if (state === BARE) draw.fillRect(0, 3, side, 1);
  else if (state === UNHELD) draw.fillRect(3, 3, 1, 1);
  else if (state === HIDDEN) draw.fillRect(0, 0, 2, side);
  else {
    draw.beginPath();
    for (const shift of [-side, 0, side]) {
      draw.moveTo(shift, side);
      draw.lineTo(shift + side, 0);
      if (state === BROKEN) {
        draw.moveTo(shift, 0);
        draw.lineTo(shift + side, side);
      }
    }
    draw.stroke();
  }
  return /** @type {CanvasPattern} */ (context.createPattern(tile, "repeat"));
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {Frame} frame
 * @param {import("../base/state.js").Model} model
 * @param {Ink} ink
 */
function paintLabels(context, frame, model, ink) {
  const { left, top, width, height, labelled, region: [q0, q1, s0, s1] } = frame;
  const down = height / (q1 - q0);
  const across = width / (s1 - s0);
  context.fillStyle = ink.text;
  context.font = `12px ${ink.font}`;
  context.textBaseline = "middle";
  for (const query of ticks(q0, q1, down, labelled)) {
    const text = labelled ? model.queryLabel(query, 14) : String(query);
    context.textAlign = "right";
    context.fillText(`\u2068${text}\u2069`, left - 7, top + (query - q0 + 0.5) * down, left - 22);
  }
  const labels = ticks(s0, s1, across, labelled).map((source) => /** @type {[number, string]} */ ([source, labelled ? model.sourceLabel(source, 14) : String(source)]));
  // Short labels stand upright.
  const turned = labelled && labels.some(([, text]) => context.measureText(text).width > across - 3);
  for (const [source, text] of labels) {
    context.save();
    context.translate(left + (source - s0 + 0.5) * across, top - (turned ? 7 : 11));
    if (turned) context.rotate(-Math.PI / 3);
    context.textAlign = turned ? "left" : "center";
    context.fillText(`\u2068${text}\u2069`, 0, 0, turned ? top - 24 : 60);
    context.restore();
  }
  context.fillStyle = ink.faint;
  context.textAlign = "left";
  context.fillText("sources →", left, 8);
  context.save();
  context.translate(8, top + Math.min(height, 70));
  context.rotate(-Math.PI / 2);
  context.fillText("← queries", 0, 0);
  context.restore();
}

/** Every position where there is room for its label, else round numbers.
 * @param {number} start
 * @param {number} stop
 * @param {number} pixels of one position
 * @param {boolean} labelled
 */
function ticks(start, stop, pixels, labelled) {
  let step = 1;
  if (!labelled) {
    const least = 46 / pixels;
    step = 10 ** Math.ceil(Math.log10(least));
    for (const part of [5, 2]) if (step / part >= least) { step /= part; break; }
    step = Math.max(1, Math.round(step));
  }
  const found = [];
  for (let at = Math.ceil(start / step) * step; at < stop; at += step) found.push(at);
  return found;
}

/**
 * The chosen row, column and cell; the end of the prompt; the borders of segments.
 * @param {CanvasRenderingContext2D} context
 * @param {Frame} frame
 * @param {import("../base/state.js").Model} model
 * @param {Ink} ink
 */
export function paintMarks(context, frame, model, ink) {
  const { left, top, width, height, region: [q0, q1, s0, s1] } = frame;
  const y = (/** @type {number} */ query) => top + ((query - q0) / (q1 - q0)) * height;
  const x = (/** @type {number} */ source) => left + ((source - s0) / (s1 - s0)) * width;
  const { entry, header } = model;
  context.save();
  context.beginPath();
  context.rect(left - 2, top - 2, width + 4, height + 4);
  context.clip();
  context.lineWidth = 1;
  const borders = (/** @type {number} */ index) => {
    const axis = header.axes[index];
    return [...(axis?.segments ?? []).map(([start]) => start), axis?.prompt ?? 0];
  };
  context.setLineDash([5, 4]);
  context.strokeStyle = ink.text;
  context.beginPath();
  for (const border of borders(entry.query_axis)) {
    const at = border - (model.positionOf(0));
    if (at > q0 && at < q1) { context.moveTo(left, y(at)); context.lineTo(left + width, y(at)); }
  }
  for (const border of borders(entry.source_axis)) {
    if (border > s0 && border < s1) { context.moveTo(x(border), top); context.lineTo(x(border), top + height); }
  }
  context.stroke();
  context.setLineDash([]);
  const { query, source } = model.pair;
  const tall = Math.max(3, height / (q1 - q0));
  const wide = Math.max(3, width / (s1 - s0));
  // Twice, the paper first: so it stands out from every colour of the map.
  for (const [style, more] of /** @type {[string, number][]} */ ([[ink.paper, 2], [ink.accent, 0]])) {
    context.strokeStyle = style;
    context.lineWidth = 1.5 + more;
    context.strokeRect(left - 1, y(query) - 0.75, width + 2, tall + 1.5);
    if (source === null) continue;
    context.strokeRect(x(source) - 0.75, top - 1, wide + 1.5, height + 2);
    context.lineWidth = (model.state.locked ? 3 : 2) + more;
    context.strokeRect(x(source) - 1, y(query) - 1, wide + 2, tall + 2);
  }
  context.restore();
}
