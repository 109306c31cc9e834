// Small helpers. Data become text nodes and attributes, never markup.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

function filled(node, { text, style, onclick, ...attributes }, children) {
  Object.assign(node.style, style);
  if (onclick) node.addEventListener("click", onclick);
  if (text !== undefined) node.textContent = text;
  for (const [name, value] of Object.entries(attributes)) if (value !== undefined) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

export const el = (tag, attributes = {}, ...children) => filled(document.createElement(tag), attributes, children);
export const svg = (tag, attributes = {}, ...children) => filled(document.createElementNS(SVG, tag), attributes, children);

const digits = (value) => value.toFixed(Math.abs(value) >= 99.95 ? 0 : Math.abs(value) >= 9.995 ? 1 : 2);

/** Write a number in the first of some units, [least number, size, name], that it reaches. */
function scaled(value, units, suffix = "") {
  if (!Number.isFinite(value)) return "–";
  const [, size, unit] = units.find(([least]) => Math.abs(value) >= least);
  const number = size === 1 && Number.isInteger(value) ? value : digits(value / size);
  return `${number} ${unit}${suffix}`.trimEnd();
}

const TIMES = [[120, 60, "min"], [0.9995, 1, "s"], [0.9995e-3, 1e-3, "ms"], [1e-12, 1e-6, "µs"], [0, 1, "s"]];
const SIZES = [...["TiB", "GiB", "MiB", "KiB"].map((name, n) => [1024 ** (4 - n), 1024 ** (4 - n), name]), [0, 1, "B"]];
const AMOUNTS = [[1e12, 1e12, "T"], [1e9, 1e9, "G"], [1e6, 1e6, "M"], [1e3, 1e3, "k"], [0, 1, ""]];

export const seconds = (value) => scaled(value, TIMES);
export const bytes = (value) => scaled(value, SIZES);
export const amount = (value, unit) => scaled(value, AMOUNTS, unit);
export const nanoseconds = (value) => seconds(value === null ? null : value / 1e9);

/** Format lost time; a negative measured difference is noise, as in `scheduling/trace/figures.py`. */
export const lost = (value) => (value <= 0 ? "none that can be told" : seconds(value));

export function percent(value, places = 0) {
  return Number.isFinite(value) ? `${(value * 100).toFixed(places).replace(/^-(?=[0.]*$)/, "")} %` : "–";
}

/** Format a duration in its two largest units. */
export function duration(value) {
  const whole = Math.max(0, Math.round(value));
  const parts = [[whole / 86400, "d"], [(whole / 3600) % 24, "h"], [(whole / 60) % 60, "min"], [whole % 60, "s"]];
  const first = Math.min(3, parts.findIndex(([count], n) => n === 3 || count >= 1));
  return parts.slice(first, first + 2).map(([count, unit]) => `${Math.floor(count)} ${unit}`).join(" ");
}

/** Make a box filled as a variable of style.css says. */
export const filledBox = (fill, style, told, text) =>
  el("span", { class: fill, "data-tip": told, text, style: { background: `var(--${fill})`, ...style } });

export const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

export function mean(values) {
  const known = values.filter(Number.isFinite);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}

/** Return round numbers that divide a range into about `count` parts. */
export function ticks(low, high, count) {
  const raw = (high - low) / Math.max(1, count);
  if (!(raw > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((size) => size * power).find((size) => size >= raw);
  const first = Math.ceil(low / step);
  return Array.from({ length: Math.floor(high / step + 1e-9) - first + 1 }, (_, n) => (first + n) * step);
}

/** Return a text, cut to the characters of 11 pixels that fit into a width; nothing if that is too narrow. */
export function fitted(text, width) {
  const most = Math.floor((width - 6) / 6);
  return text.length <= most ? text : most < 3 ? "" : `${text.slice(0, most - 1)}…`;
}

/** Show lines of text beside a point of the window, the first as a title; without lines hide what was shown. */
export function tell(lines, x, y) {
  const tip = byId("tip");
  tip.hidden = !lines;
  if (!lines) return;
  tip.textContent = lines.join("\n");
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${x + 16 + width > window.innerWidth ? Math.max(4, x - 16 - width) : x + 16}px`;
  tip.style.top = `${Math.max(4, Math.min(y + 14, window.innerHeight - height - 4))}px`;
}

let pointer = "";

// A tip stays while an element is drawn anew, which a title of the browser's does not: browsers then tell of a pointer
// that has not moved. A canvas knows by its function `lines` what it shows.
document.addEventListener("pointermove", ({ target, clientX, clientY, offsetX, offsetY }) => {
  if (pointer === `${clientX} ${clientY}`) return;
  pointer = `${clientX} ${clientY}`;
  tell(target.lines?.(offsetX, offsetY) ?? target.closest("[data-tip]")?.dataset.tip.split("\n"), clientX, clientY);
});

/** Return a cell's colours from amber (-1) over the card's colour (0) to blue (1), for any colour vision. */
export function heat(value) {
  const share = Math.max(-1, Math.min(1, value));
  const background = `color-mix(in srgb, var(${share < 0 ? "--worse" : "--better"}) ${Math.abs(share) * 100}%, var(--card))`;
  return { background, color: Math.abs(share) > 0.5 ? "#ffffff" : "" };
}
