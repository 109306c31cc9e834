// Colours of what is drawn: those of style.css, for canvases. Blue and amber stand apart in every kind of colour vision,
// forward and backward by lightness; what hurts is red and striped.

import { el, stroke } from "./dom.js";

const COLOURS = ["ink", "quiet", "line", "card", "row", "hurt", "stripe", "wash", "hidden", "compute", "slow", "idle", "select", "block", "paired", "peer", "dot"];

export const theme = { dark: false, colours: {} };

function apply(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  const style = getComputedStyle(document.documentElement);
  const value = (name) => style.getPropertyValue(`--${name}`).trim();
  theme.dark = dark;
  theme.colours = Object.fromEntries(COLOURS.map((name) => [name, value(name)]));
  theme.colours.lines = value("lines").split(" ");
  theme.colours.strands = ["neither", "alpha", "beta"].map((strand) => value(`strand-${strand}`).split(" ")); // by direction
}

export const toggleTheme = () => apply(!theme.dark);

const wish = new URLSearchParams(location.search).get("theme");
apply(wish ? wish === "dark" : window.matchMedia("(prefers-color-scheme: dark)").matches);

function tileOf(context, size, back, draw) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = size;
  const brush = tile.getContext("2d");
  brush.fillStyle = back;
  brush.fillRect(0, 0, size, size);
  draw(brush);
  return context.createPattern(tile, "repeat");
}

/** Make a pattern of dots: waiting for a peer. */
export function dotted(context) {
  return tileOf(context, 5, theme.colours.peer, (brush) => {
    brush.fillStyle = theme.colours.dot;
    brush.fillRect(1, 1, 2, 2);
  });
}

/** Make a pattern of diagonal stripes: exposed transfers. */
export function stripes(context) {
  return tileOf(context, 8, theme.colours.hurt, (brush) => {
    brush.lineWidth = 2;
    for (const shift of [-8, 0, 8]) stroke(brush, [shift - 1, 9], [shift + 9, -1], theme.colours.stripe);
  });
}

/** Make a legend from entries [name, a colour, or "stripes" or "dotted"]. */
export function legend(box, entries) {
  box.replaceChildren(...entries.map(([name, paint]) => {
    const swatch = el("i", { class: paint });
    swatch.style.background = ["stripes", "dotted"].includes(paint) ? "" : paint;
    return el("span", {}, swatch, name);
  }));
}
