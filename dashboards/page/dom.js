// Small helpers. Data become text nodes and attributes, never markup.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") node.textContent = String(value);
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, String(value));
  }
  node.append(...children);
  return node;
}

export const el = (tag, attributes = {}, ...children) => filled(document.createElement(tag), attributes, children);
export const svg = (tag, attributes = {}, ...children) => filled(document.createElementNS(SVG, tag), attributes, children);

/** Make a table of text cells; `head` may be empty. */
export function table(head, rows) {
  const lines = rows.map((row) => el("tr", {}, ...row.map((cell) => el("td", { text: cell }))));
  const top = head.length ? [el("thead", {}, el("tr", {}, ...head.map((cell) => el("th", { scope: "col", text: cell }))))] : [];
  return el("table", {}, ...top, el("tbody", {}, ...lines));
}

const known = (value) => typeof value === "number" && Number.isFinite(value);

const digits = (value) => (Math.abs(value) >= 99.95 ? value.toFixed(0) : Math.abs(value) >= 9.995 ? value.toFixed(1) : value.toFixed(2));

export function seconds(value) {
  if (!known(value)) return "–";
  const size = Math.abs(value);
  if (size >= 120) return `${digits(value / 60)} min`;
  if (size >= 0.9995) return `${digits(value)} s`;
  if (size >= 0.9995e-3) return `${digits(value * 1e3)} ms`;
  return size === 0 ? "0 s" : `${digits(value * 1e6)} µs`;
}

/** Format lost time; a negative measured difference is noise, as in `scheduling/trace/figures.py`. */
export const lost = (value) => (known(value) && value <= 0 ? "none that can be told" : seconds(value));
export const nanoseconds = (value) => (known(value) ? seconds(value / 1e9) : "–");
export const percent = (value, places = 0) => (known(value) ? `${(value * 100).toFixed(places).replace(/^-(?=[0.]*$)/, "")} %` : "–");

export function amount(value, unit = "") {
  if (!known(value)) return "–";
  const steps = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
  const step = steps.find(([size]) => Math.abs(value) >= size);
  const space = unit || step ? " " : "";
  if (step) return `${digits(value / step[0])}${space}${step[1]}${unit}`;
  return `${Number.isInteger(value) ? value : digits(value)}${space}${unit}`;
}

export function bytes(value) {
  if (!known(value)) return "–";
  const place = value < 1024 ? 0 : Math.min(4, Math.floor(Math.log2(value) / 10));
  return `${place ? digits(value / 1024 ** place) : value} ${["B", "KiB", "MiB", "GiB", "TiB"][place]}`;
}

/** Format a duration in its two largest units of hours, minutes and seconds. */
export function duration(value) {
  const whole = Math.max(0, Math.round(value));
  const parts = [[Math.floor(whole / 86400), "d"], [Math.floor(whole / 3600) % 24, "h"], [Math.floor(whole / 60) % 60, "min"], [whole % 60, "s"]];
  const first = parts.findIndex(([count]) => count);
  return (first < 0 ? [parts[3]] : parts.slice(first, first + 2)).map(([count, unit]) => `${count} ${unit}`).join(" ");
}

export function mean(values) {
  const found = values.filter(known);
  return found.length ? found.reduce((sum, one) => sum + one, 0) / found.length : null;
}

/** Size a canvas to its box in device pixels; return its context in CSS pixels, with width and height. */
export function surface(canvas, height) {
  const ratio = window.devicePixelRatio || 1;
  const width = Math.max(50, canvas.clientWidth);
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = "11px system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif";
  context.textBaseline = "middle";
  return { context, width, height };
}

/** Write text on a canvas. */
export function write(context, text, x, y, colour, align = "left") {
  context.fillStyle = colour;
  context.textAlign = align;
  context.fillText(text, x, y);
}

/** Draw a straight line on a canvas. */
export function stroke(context, [x, y], [toX, toY], colour) {
  context.strokeStyle = colour;
  context.beginPath();
  context.moveTo(x, y);
  context.lineTo(toX, toY);
  context.stroke();
}

/** Return round numbers that divide a range into about `count` parts. */
export function ticks(low, high, count) {
  const raw = (high - low) / Math.max(1, count);
  if (!(raw > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= raw);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-9; value += step) found.push(Math.abs(value) < step * 1e-9 ? 0 : value);
  return found;
}

const tip = byId("tip");

/** Show a tip beside a point of the screen: the first row is a title, others are [name, text] or text. */
export function showTip(x, y, rows) {
  const [title, ...rest] = rows;
  const cells = rest.map((row) =>
    Array.isArray(row) ? el("tr", {}, el("td", { text: row[0] }), el("td", { text: row[1] })) : el("tr", {}, el("td", { colspan: 2, text: row })));
  tip.replaceChildren(el("b", { text: title }), el("table", {}, ...cells));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = x + 16 + box.width > window.innerWidth ? Math.max(4, x - 16 - box.width) : x + 16;
  const top = Math.min(Math.max(4, y + 14), Math.max(4, window.innerHeight - box.height - 4));
  tip.style.left = `${left}px`;
  tip.style.top = `${top}px`;
}

export function hideTip() {
  tip.hidden = true;
}

/** Show a tip with the rows that `tell` returns for the point under the pointer, if any. */
export function hover(node, tell) {
  node.addEventListener("pointermove", (event) => {
    const rows = tell(event.offsetX, event.offsetY);
    if (rows) showTip(event.clientX, event.clientY, rows);
    else hideTip();
  });
  node.addEventListener("pointerleave", hideTip);
}
