// Spans of a step: finding them, and what is told about them. Times are nanoseconds from the step's begin.

import { amount, bytes, lost, nanoseconds, percent, seconds } from "./dom.js";

export const LANES = ["compute", "intra-node", "inter-node"];
export const SHORT_LANES = ["comp.", "intra", "inter"];
const DIRECTIONS = ["", "forward", "backward"];

export const spoken = (rows) => rows.map((row) => (Array.isArray(row) ? row.join(" ") : row)).join(" · ");

export function lastEnd(data, rank) {
  const own = data.ranks.get(rank);
  if (!own) return 0;
  const [first, count] = own.waits;
  return Math.max(0, ...own.lanes.map(({ reached }) => reached.at(-1) ?? 0), ...data.columns.wait_end.slice(first, first + count).slice(-64));
}

/** The first place whose latest end lies beyond a time: nothing before it is in view. */
export function firstReaching(reached, time) {
  let [low, high] = [0, reached.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (reached[middle] < time) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** The shortest span at a time, or else one within a pixel of it. */
export function spanAt(data, { spans, reached }, time, slack) {
  const { start, end } = data.columns;
  let best = null;
  for (let place = firstReaching(reached, time - slack); place < spans.length; place += 1) {
    const span = spans[place];
    if (start[span] > time + slack) break;
    if (end[span] < time - slack) continue;
    const score = Math.max(0, start[span] - time, time - end[span]) * 1e6 + (end[span] - start[span]);
    if (best === null || score < best.score) best = { span, score };
  }
  return best === null ? null : best.span;
}

/** The place of an interval at a time; `kind`: "exposed" transfers, or "waits" for peers. */
export function intervalAt(data, own, kind, time, slack) {
  const [start, end] = intervals(data, kind);
  for (let place = own[kind][0]; place < own[kind][0] + own[kind][1]; place += 1) {
    if (start[place] - slack <= time && time <= end[place] + slack) return place;
  }
  return null;
}

/** Begins and ends of all ranks' intervals of a kind. */
export function intervals({ columns }, kind) {
  return kind === "waits" ? [columns.wait_start, columns.wait_end] : [columns.exposed_start, columns.exposed_end];
}

export function describeInterval({ rank, data, kind, place }) {
  const [start, end] = intervals(data, kind);
  const length = nanoseconds(end[place] - start[place]);
  if (kind === "exposed") return [`rank ${rank} waits for a transfer`, `${length} in which it is under way and nothing is computed`];
  const facts = data.labels[data.columns.wait_label[place]];
  const layer = facts.layer >= 0 ? `, layer ${facts.layer}` : "";
  return [`rank ${rank} waits for rank ${data.columns.wait_peer[place]} (${facts.operator}${layer})`, `${length} in which nothing runs here, and that rank has not begun the collective`];
}

/** Nanoseconds of a span during which its rank waits. */
function exposedIn(data, { exposed: [first, count] }, from, to) {
  const ends = data.columns.exposed_end.slice(first, first + count);
  return ends.reduce((sum, end, n) => sum + Math.max(0, Math.min(end, to) - Math.max(data.columns.exposed_start[first + n], from)), 0);
}

export function describeSpan({ rank, data, span }) {
  const { start, end, label, strand, direction, micro_batch: batch, chunk } = data.columns;
  const facts = data.labels[label[span]];
  const length = end[span] - start[span];
  const where = [
    `rank ${rank}`, LANES[facts.lane], data.strands[strand[span]] && `strand ${data.strands[strand[span]]}`, DIRECTIONS[direction[span]],
    batch[span] >= 0 && `micro-batch ${batch[span]}`, chunk[span] >= 0 && `chunk ${chunk[span]}`, facts.layer >= 0 && `layer ${facts.layer}`,
  ];
  const rows = [facts.operator, where.filter(Boolean).join(" · "), ["measured", nanoseconds(length)]];
  const beside = (other) => `${nanoseconds(other)} (measured: ${percent(Math.abs(length / other - 1))} ${length >= other ? "longer" : "shorter"})`;
  if (facts.predicted_ns) rows.push(["predicted", beside(facts.predicted_ns)]);
  if (facts.solo_ns) rows.push(["alone", beside(facts.solo_ns)]);
  if (facts.shapes) rows.push(["shapes", facts.shapes]);
  if (facts.lane > 0) {
    const waits = exposedIn(data, data.ranks.get(rank), start[span], end[span]);
    rows.push(["hidden", nanoseconds(length - waits)], ["exposed", nanoseconds(waits)]);
  }
  if (facts.bytes) rows.push(["sent", `${bytes(facts.bytes)}, ${amount(facts.bytes / (length / 1e9), "B/s")}`]);
  if (facts.flops) rows.push(["arithmetic", `${amount(facts.flops, "FLOP")}, ${amount(facts.flops / (length / 1e9), "FLOP/s")}`]);
  rows.push(["begins at", nanoseconds(start[span])]);
  return rows;
}

const NUMBERS = [["computes", "compute"], ["communication", "communication"], ["hidden", "hidden"], ["exposed: waits for transfers", "exposed"], ["waits for peers", "waiting"], ["slowdown", "slowdown"], ["launch gap", "launch_gap"], ["bubble", "bubble"]];

/** Rows of the numbers of overlap that are known; `find` has them by name, in seconds. */
export function namedNumbers(find) {
  const known = NUMBERS.map(([title, name]) => [title, find(name), name]).filter(([, value]) => typeof value === "number");
  return known.map(([title, value, name]) => [title, (name === "slowdown" ? lost : seconds)(value)]);
}

export function numberRows(own) {
  if (!own) return [];
  const rows = namedNumbers((name) => own.numbers[`${name}_ns`] === null ? null : own.numbers[`${name}_ns`] / 1e9);
  if (own.dropped) rows.push(["spans dropped", String(own.dropped)]);
  if (own.damage) rows.push(["damaged", own.damage]);
  return rows;
}
