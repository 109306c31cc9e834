// Spans of a step: finding them, and what is told about them. Times are nanoseconds from the step's begin.

import { amount, bytes, nanoseconds, percent } from "./dom.js";

export const LANES = ["compute", "intra-node", "inter-node"];
const DIRECTIONS = ["", "forward", "backward"];

export const spoken = (rows) => rows.map((row) => (Array.isArray(row) ? row.join(" ") : row)).join(" · ");

export function lastEnd(data, rank) {
  const own = data.ranks.get(rank);
  return own ? Math.max(0, ...own.lanes.map(({ reached }) => reached.at(-1) ?? 0)) : 0;
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

export function exposedAt(data, own, time, slack) {
  const { exposed_start: start, exposed_end: end } = data.columns;
  for (let place = own.exposed[0]; place < own.exposed[0] + own.exposed[1]; place += 1) {
    if (start[place] - slack <= time && time <= end[place] + slack) return place;
  }
  return null;
}

/** Nanoseconds of a span during which its rank waits. */
function exposedIn(data, own, from, to) {
  const { exposed_start: start, exposed_end: end } = data.columns;
  let total = 0;
  for (let place = own.exposed[0]; place < own.exposed[0] + own.exposed[1]; place += 1) {
    total += Math.max(0, Math.min(end[place], to) - Math.max(start[place], from));
  }
  return total;
}

export function describeSpan({ rank, data, span }) {
  const { start, end, label, lane, strand, direction, micro_batch: batch, chunk } = data.columns;
  const facts = data.labels[label[span]];
  const length = end[span] - start[span];
  const where = [
    `rank ${rank}`, LANES[lane[span]], data.strands[strand[span]] && `strand ${data.strands[strand[span]]}`, DIRECTIONS[direction[span]],
    batch[span] >= 0 && `micro-batch ${batch[span]}`, chunk[span] >= 0 && `chunk ${chunk[span]}`, facts.layer >= 0 && `layer ${facts.layer}`,
  ];
  const rows = [facts.operator, where.filter(Boolean).join(" · "), ["measured", nanoseconds(length)]];
  const beside = (other) => `${nanoseconds(other)} (measured: ${percent(Math.abs(length / other - 1))} ${length >= other ? "longer" : "shorter"})`;
  if (facts.predicted_ns) rows.push(["predicted", beside(facts.predicted_ns)]);
  if (facts.solo_ns) rows.push(["alone", beside(facts.solo_ns)]);
  if (facts.shapes) rows.push(["shapes", facts.shapes]);
  if (lane[span] > 0) {
    const waits = exposedIn(data, data.ranks.get(rank), start[span], end[span]);
    rows.push(["hidden", nanoseconds(length - waits)], ["exposed", nanoseconds(waits)]);
  }
  if (facts.bytes) rows.push(["sent", `${bytes(facts.bytes)}, ${amount(facts.bytes / (length / 1e9), "B/s")}`]);
  if (facts.flops) rows.push(["arithmetic", `${amount(facts.flops, "FLOP")}, ${amount(facts.flops / (length / 1e9), "FLOP/s")}`]);
  rows.push(["begins at", nanoseconds(start[span])]);
  return rows;
}

export function numberRows(own) {
  if (!own) return [];
  const numbers = own.numbers;
  const names = [["computes", "compute_ns"], ["communication", "communication_ns"], ["hidden", "hidden_ns"], ["exposed: waits", "exposed_ns"], ["slowdown", "slowdown_ns"], ["launch gap", "launch_gap_ns"], ["bubble", "bubble_ns"]];
  const rows = names.filter(([, name]) => numbers[name] !== null).map(([title, name]) => [title, nanoseconds(numbers[name])]);
  if (own.dropped) rows.push(["spans dropped", String(own.dropped)]);
  if (own.damage) rows.push(["damaged", own.damage]);
  return rows;
}
