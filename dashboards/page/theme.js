// Colours of what is drawn. Blue and amber stand apart in every kind of colour vision, forward and backward by
// lightness; what hurts is red and striped.

import { stroke } from "./dom.js";

const LIGHT = {
  ink: "#16202b", quiet: "#566270", line: "#d9dee5", card: "#ffffff", row: "#f3f5f8",
  strands: [
    ["#9aa5b1", "#9aa5b1", "#7d8894"],
    ["#3a9bdc", "#5fb3e8", "#00568a"],
    ["#e0a21b", "#f5c451", "#a86700"],
  ],
  hurt: "#c2003b", hurtStripe: "#ff9db8", wash: "rgba(194,0,59,0.13)",
  hidden: "#00856a", compute: "#5b7590", slow: "#7b4fa3", idle: "#d5dae1", other: "#5b6875",
  lines: ["#0072b2", "#a86700", "#7b4fa3", "#00856a"], select: "#000000",
  block: "#8b97a4", paired: "#3d4853", peer: "#46525e", peerDot: "#ffffff",
};
const DARK = {
  ink: "#e8edf2", quiet: "#9fb0c0", line: "#2c3743", card: "#171e26", row: "#1d2630",
  strands: [
    ["#75818e", "#75818e", "#596572"],
    ["#4aa8e0", "#7cc7f5", "#1f6fa8"],
    ["#e0a630", "#ffd071", "#a87010"],
  ],
  hurt: "#ff3d71", hurtStripe: "#7d0026", wash: "rgba(255,61,113,0.20)",
  hidden: "#2fbf9f", compute: "#6f8aa6", slow: "#b48be0", idle: "#36414d", other: "#8a98a6",
  lines: ["#4fb0ea", "#f2b134", "#b48be0", "#2fbf9f"], select: "#ffffff",
  block: "#6b7885", paired: "#c3ced9", peer: "#c9d3dc", peerDot: "#171e26",
};

export const theme = { dark: false, colours: LIGHT };

function apply(dark) {
  theme.dark = dark;
  theme.colours = dark ? DARK : LIGHT;
  document.documentElement.dataset.theme = dark ? "dark" : "light";
}

export const toggleTheme = () => apply(!theme.dark);

const wish = new URLSearchParams(location.search).get("theme");
apply(wish ? wish === "dark" : window.matchMedia("(prefers-color-scheme: dark)").matches);

function tileOf(size) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = size;
  return [tile, tile.getContext("2d")];
}

/** Dots: waiting for a peer. */
export function dotted(context) {
  const [tile, brush] = tileOf(5);
  brush.fillStyle = theme.colours.peer;
  brush.fillRect(0, 0, 5, 5);
  brush.fillStyle = theme.colours.peerDot;
  brush.fillRect(1, 1, 2, 2);
  return context.createPattern(tile, "repeat");
}

/** Diagonal stripes: exposed transfers. */
export function stripes(context) {
  const [tile, brush] = tileOf(8);
  brush.fillStyle = theme.colours.hurt;
  brush.fillRect(0, 0, 8, 8);
  brush.lineWidth = 2;
  for (const shift of [-8, 0, 8]) stroke(brush, [shift - 1, 9], [shift + 9, -1], theme.colours.hurtStripe);
  return context.createPattern(tile, "repeat");
}

const PATTERNS = { stripes, dotted };

/** A key to colours: [name, colour or a pattern's name, ...]. */
export function legend(box, entries) {
  box.replaceChildren(...entries.map(([name, ...paints]) => {
    const canvas = document.createElement("canvas");
    canvas.width = 52;
    canvas.height = 24;
    const brush = canvas.getContext("2d");
    brush.scale(2, 2);
    paints.forEach((paint, place) => {
      brush.fillStyle = PATTERNS[paint]?.(brush) ?? paint;
      brush.fillRect((26 * place) / paints.length, 0, 26 / paints.length, 12);
    });
    const entry = document.createElement("span");
    entry.append(canvas, name);
    return entry;
  }));
}
