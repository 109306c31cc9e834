// Mixtures of experts: how tokens of a step were spread over the experts of every layer, and how that changes.

import { byId, hover, mean, percent, surface, write } from "./dom.js";
import { heatColour } from "./plan.js";
import { legend, stripes, theme } from "./theme.js";

const [LEFT, RIGHT, TOP, BOTTOM] = [62, 74, 20, 34];

const times = (value) => (typeof value === "number" ? `${value.toFixed(value < 10 ? 2 : 1)} ×` : "–");
const loss = (value) => (typeof value === "number" ? (value === 0 ? "0" : value.toPrecision(3)) : "–");

const knows = (run, name) => run.columns[`experts.${name}`]?.some((value) => typeof value === "number");

/** Specifications of the section's charts, in the form of those in charts.js. */
export function expertCharts(run) {
  const column = (name) => run.columns[`experts.${name}`] ?? [];
  const known = (name) => knows(run, name);
  const [first, second, third, fourth] = theme.colours.lines;
  const found = [
    { name: "Fullest over the average", write: times, lines: [["expert, mean over layers", column("imbalance"), first], ["expert, worst layer", column("worst_imbalance"), second], ["rank, mean over layers", column("rank_imbalance"), third]] },
    { name: "Entropy of the load; balanced: 100 %", write: (v) => percent(v, 1), lines: [["mean over layers", column("entropy"), first], ["worst layer", column("worst_entropy"), second]] },
  ];
  if (known("dropped")) found.push({ name: "Visits dropped", write: (v) => percent(v, 1), zero: true, lines: [["mean over layers", column("dropped"), first], ["worst layer", column("worst_dropped"), second]] });
  if (known("balance_loss") || known("z_loss")) found.push({ name: "Auxiliary losses per token, not in the loss", write: loss, zero: true, lines: [["balance", column("balance_loss"), fourth], ["z", column("z_loss"), third]] });
  return found;
}

export const hasExperts = (run) => Array.isArray(run.columns["experts.imbalance"]);

export class Experts {
  constructor(canvas, run) {
    Object.assign(this, { canvas, run, cell: null });
    hover(canvas, (x, y) => this._tell(x, y));
  }

  draw() {
    byId("experts-section").hidden = !hasExperts(this.run);
    const found = this.run.visits;
    if (!hasExperts(this.run) || !found?.visits?.length) return;
    const count = Math.max(...found.visits.map((row) => row.length));
    const tall = Math.max(7, Math.min(24, Math.floor(480 / found.visits.length)));
    const { context, width } = surface(this.canvas, TOP + BOTTOM + tall * found.visits.length);
    const wide = Math.min(120, (width - LEFT - RIGHT) / count);
    this.cell = { wide, tall, count };
    found.visits.forEach((row, place) => this._row(context, row, place));
    this._axes(context, found);
    byId("experts-step").textContent = String(found.step);
    byId("experts-read").textContent = this._told();
  }

  _row(context, row, place) {
    const { wide, tall } = this.cell;
    const average = mean(row) || 1;
    const gap = wide > 8 && tall > 8 ? 1 : 0;
    const empty = stripes(context);
    row.forEach((visits, expert) => {
      const [paint, ink] = heatColour(share(visits / average));
      const [x, y] = [LEFT + expert * wide, TOP + place * tall];
      context.fillStyle = visits ? paint : empty;
      context.fillRect(x, y, Math.max(0.6, wide - gap), tall - gap);
      if (wide < 34 || tall < 15 || !visits) return;
      write(context, (visits / average).toFixed(2), x + wide / 2, y + tall / 2, ink, "center");
    });
  }

  _axes(context, found) {
    const { wide, tall, count } = this.cell;
    const colours = theme.colours;
    const end = LEFT + count * wide;
    const bottom = TOP + found.visits.length * tall;
    const fullest = found.visits.map((row) => Math.max(...row) / (mean(row) || 1));
    const every = (size, least) => [1, 2, 4, 8, 16, 32, 64].find((one) => one * size >= least) ?? 128;
    const named = (place) => place % every(tall, 13) === 0;
    const middle = (place) => TOP + (place + 0.5) * tall;
    write(context, "layer", LEFT - 8, TOP - 9, colours.quiet, "right");
    found.layers.forEach((layer, place) => named(place) && write(context, layer, LEFT - 8, middle(place), colours.quiet, "right"));
    write(context, "fullest", end + 8, TOP - 9, colours.quiet);
    const worst = fullest.indexOf(Math.max(...fullest));
    fullest.forEach((value, place) => {
      if (place === worst) write(context, times(value), end + 8, middle(place), colours.ink);
      else if (named(place) && Math.abs(place - worst) * tall >= 13) write(context, times(value), end + 8, middle(place), colours.quiet);
    });
    for (let expert = 0; expert < count; expert += every(wide, 26)) write(context, expert, LEFT + (expert + 0.5) * wide, bottom + 9, colours.quiet, "center");
    write(context, this.ranks > 1 ? `expert; lines part the ${this.ranks} ranks of ep, ${count / this.ranks} experts each` : "expert", LEFT, bottom + 25, colours.quiet);
    context.fillStyle = colours.ink;
    for (let rank = 1; rank < this.ranks; rank += 1) context.fillRect(Math.round(LEFT + (rank * count * wide) / this.ranks) - 1, TOP - 4, 1.5, bottom - TOP + 8);
  }

  /** Number of ranks over which the experts are distributed. */
  get ranks() {
    const ep = this.run.state?.config?.parallel?.ep;
    return Number.isInteger(ep) && ep > 1 && this.cell.count % ep === 0 ? ep : 1;
  }

  /** Describe the newest step in a sentence. */
  _told() {
    const now = (name) => this.run.columns[`experts.${name}`]?.at(-1) ?? null;
    const facts = [`the fullest expert has ${times(now("imbalance"))} the average, in the worst layer ${times(now("worst_imbalance"))}`, `entropy ${percent(now("entropy"), 1)} of a balanced load's`];
    if (now("rank_imbalance") !== null) facts.push(`the fullest rank has ${times(now("rank_imbalance"))} the average`);
    if (now("dropped") !== null) facts.push(`${percent(now("dropped"), 1)} of visits dropped`);
    const unvisited = now("unvisited");
    facts.push(`${unvisited || "no"} expert${unvisited > 1 ? "s" : ""} without a visit`);
    return `Step ${this.run.columns.step.at(-1)}: ${facts.join("; ")}.`;
  }

  _tell(x, y) {
    const found = this.run.visits;
    const { wide, tall, count } = this.cell ?? {};
    const [expert, place] = [Math.floor((x - LEFT) / wide), Math.floor((y - TOP) / tall)];
    const visits = expert >= 0 && place >= 0 ? found?.visits[place]?.[expert] : undefined;
    if (visits === undefined) return null;
    const row = found.visits[place];
    const all = row.reduce((sum, one) => sum + one, 0);
    const rows = [["visits", visits.toLocaleString("en")], ["share of the layer's", percent(visits / all, 2)], ["over the average", times((visits * row.length) / all)]];
    if (this.ranks > 1) rows.push(["rank of ep", String(Math.floor((expert * this.ranks) / count))]);
    return [`layer ${found.layers[place]}, expert ${expert}, step ${found.step}`, ...rows];
  }
}

/** Map a load to `heatColour`'s scale: 1 is a quarter of the average, -1 (amber, too full) four times the average. */
const share = (ratio) => (ratio > 0 ? Math.max(-1, Math.min(1, -Math.log2(ratio) / 2)) : 1);

export function drawExpertLegends(run) {
  const paint = (ratio) => heatColour(share(ratio))[0];
  const [first, second, third, fourth] = theme.colours.lines;
  legend(byId("experts-legend"), [["a quarter of the average or less", paint(0.25)], ["half", paint(0.5)], ["average", paint(1)], ["twice", paint(2)], ["four times or more", paint(4)], ["no visit", "stripes"]]);
  const more = [["rank_imbalance", "fullest rank", third], ["balance_loss", "balance loss", fourth], ["z_loss", "z loss", third]];
  legend(byId("expert-charts-legend"), [["mean over layers", first], ["worst layer", second], ...more.filter(([name]) => knows(run, name)).map(([, ...entry]) => entry)]);
}
