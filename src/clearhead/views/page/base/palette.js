// Colours of weights, computed in OKLab: lightness is monotone, so that they read in grey and for
// colour-blind readers. Zero is near the paper in both themes.

/** @typedef {{sequential: Uint32Array, diverging: Uint32Array, dark: boolean}} Palette */

const STEPS = 256;
// Where an allowed edge of a mask stands on the palette: a mask is no weight of one.
export const ALLOWED = 0.62;

/** @type {Map<boolean, Palette>} */
const made = new Map();

/**
 * @param {boolean} dark
 * @returns {Palette}
 */
export function palette(dark) {
  let found = made.get(dark);
  if (!found) {
    found = { sequential: sequence(dark), diverging: divergence(dark), dark };
    made.set(dark, found);
  }
  return found;
}

/** @param {boolean} dark */
function sequence(dark) {
  return table((t) =>
    dark
      ? [0.24 + 0.7 * t, 0.035 + 0.12 * Math.sin(Math.PI * Math.min(1, t * 0.92 + 0.06)), 285 - 185 * t]
      : [0.975 - 0.68 * t, 0.012 + 0.12 * Math.sin(Math.PI * Math.min(1, t * 0.85 + 0.04)), 100 + 175 * t],
  );
}

/** From blue (negative) over the paper to orange (positive).
 * @param {boolean} dark
 */
function divergence(dark) {
  return table((t) => {
    const far = Math.abs(2 * t - 1);
    const light = dark ? 0.26 + 0.5 * far : 0.97 - 0.42 * far;
    return [light, 0.005 + 0.14 * far, t < 0.5 ? 255 : 55];
  });
}

/** @param {(t: number) => number[]} colour lightness, chroma, hue in degrees */
function table(colour) {
  const colours = new Uint32Array(STEPS);
  for (let i = 0; i < STEPS; i++) {
    const [light, chroma, hue] = colour(i / (STEPS - 1));
    colours[i] = packed(light, chroma, (hue * Math.PI) / 180);
  }
  return colours;
}

/**
 * OKLCH as RGBA, in the byte order of ImageData on a little-endian machine.
 * @param {number} light
 * @param {number} chroma
 * @param {number} hue
 */
function packed(light, chroma, hue) {
  const a = chroma * Math.cos(hue);
  const b = chroma * Math.sin(hue);
  const l = (light + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (light - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (light - 0.0894841775 * a - 1.291485548 * b) ** 3;
  const red = gamma(4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s);
  const green = gamma(-1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s);
  const blue = gamma(-0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s);
  return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}

/** @param {number} linear */
function gamma(linear) {
  const c = Math.min(1, Math.max(0, linear));
  return Math.round(255 * (c <= 0.0031308 ? 12.92 * c : 1.055 * c ** (1 / 2.4) - 0.055));
}

/**
 * @param {Uint32Array} colours
 * @param {number} t from 0 to 1
 */
export function colourAt(colours, t) {
  return colours[Math.max(0, Math.min(STEPS - 1, Math.round(t * (STEPS - 1))))];
}

/** @param {number} colour */
export function css(colour) {
  return `rgb(${colour & 255} ${(colour >> 8) & 255} ${(colour >> 16) & 255})`;
}

/** Whether black text reads better on it than white (WCAG relative luminance).
 * @param {number} colour
 */
export function takesDarkText(colour) {
  const part = [0, 8, 16].map((shift) => {
    const c = ((colour >> shift) & 255) / 255;
    return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * part[0] + 0.7152 * part[1] + 0.0722 * part[2] > 0.179;
}

const SMALLEST_LOG2 = -12;

/**
 * Where a weight stands on the palette, 0 to 1; a difference stands at 0.5 when it is zero.
 * @param {number} value
 * @param {number} largest
 * @param {"linear" | "sqrt" | "log"} scale
 * @param {boolean} difference
 */
export function place(value, largest, scale, difference) {
  if (!(largest > 0)) return difference ? 0.5 : 0;
  const share = Math.min(1, Math.abs(value) / largest);
  let t = share;
  if (scale === "sqrt") t = Math.sqrt(share);
  else if (scale === "log") t = share > 0 ? Math.max(0, 1 - Math.log2(share) / SMALLEST_LOG2) : 0;
  return difference ? 0.5 + (Math.sign(value) * t) / 2 : t;
}
