// Elements without markup strings: attributes, listeners and text nodes.

/** @typedef {Node | string | number | null | undefined | false | any[]} Child */

/**
 * Make an element. Properties that begin with "on" are listeners; `null` and `false` are left out.
 * @template {keyof HTMLElementTagNameMap} K
 * @param {K} name
 * @param {Record<string, any> | null} [attributes]
 * @param {...Child} children
 * @returns {HTMLElementTagNameMap[K]}
 */
export function element(name, attributes = null, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value === true ? "" : String(value));
  }
  append(made, children);
  return made;
}

/**
 * @param {Element} parent
 * @param {Child[]} children
 */
function append(parent, children) {
  for (const child of children.flat(9)) {
    if (child === null || child === undefined || child === false) continue;
    parent.append(typeof child === "number" ? String(child) : child);
  }
}

/**
 * @param {Element} parent
 * @param {...Child} children
 */
export function fill(parent, ...children) {
  parent.replaceChildren();
  append(parent, children);
}

/**
 * A labelled choice.
 * @param {string} label
 * @param {[string, string][]} options value and text
 * @param {string} value
 * @param {(value: string) => void} chosen
 * @param {Record<string, any>} [attributes]
 */
export function choice(label, options, value, chosen, attributes = {}) {
  const select = element("select", {
    ...attributes,
    onchange: () => chosen(select.value),
  });
  for (const [key, text] of options) select.append(element("option", { value: key }, text));
  select.value = value;
  return element("label", { class: "field" }, element("span", null, label), select);
}

/**
 * @param {string} text
 * @param {() => void} clicked
 * @param {Record<string, any>} [attributes]
 */
export function button(text, clicked, attributes = {}) {
  return element("button", { type: "button", onclick: clicked, ...attributes }, text);
}

/** A label with its leading space as a thin mark. @param {string} text @returns {Child[]} */
export function marked(text) {
  if (!text.startsWith("␣") || text.length === 1) return [text];
  return [element("span", { class: "space" }, "␣"), text.slice(1)];
}

/**
 * A token as an isolated run of text.
 * @param {string} text
 * @param {string} [title]
 */
export function isolated(text, title) {
  return element("bdi", { class: "token", dir: "auto", title }, marked(text));
}

/** Draw at the next frame, once, however often it is asked for.
 * @param {() => void} draw
 */
export function atNextFrame(draw) {
  let waiting = false;
  return () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      draw();
    });
  };
}

/** Let the browser answer in between. */
export function pause() {
  return new Promise((resolve) => setTimeout(resolve, 0));
}

/**
 * Call `shown(element)` when it comes near the visible part, `gone` when it leaves.
 * @param {(target: Element) => void} shown
 * @param {(target: Element) => void} [gone]
 */
export function whenNear(shown, gone) {
  return new IntersectionObserver(
    (entries) => {
      for (const entry of entries) {
        if (entry.isIntersecting) shown(entry.target);
        else gone?.(entry.target);
      }
    },
    { rootMargin: "300px" },
  );
}
