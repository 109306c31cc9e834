// The page's summary: hidden and exposed communication, in words and as two bars to one scale.

import { byId, duration, el, lost, mean, percent, seconds } from "./dom.js";

const WINDOW = 10;
const PACE = 50; // number of last steps, with their saves and validations, from which the remaining time is estimated

/** Return means over the newest steps. */
export function recent(run) {
  const { columns } = run;
  const count = columns.step.length;
  const from = Math.max(count > 1 ? 1 : 0, count - WINDOW); // the first step also warms up
  const of = (name) => mean((columns[name] ?? []).slice(from));
  const steps = columns.step.slice(from);
  return {
    count: steps.length,
    step: of("seconds"),
    communication: of("communication_seconds"),
    exposed: of("exposed_seconds"),
    slowdown: of("slowdown_seconds"),
    waiting: of("waiting_seconds"),
    axes: axesOf(run).map((axis) => [axis, of(`exposed_by_axis.${axis}`)]),
    compute: mean(steps.map((step) => run.ranks?.compute[step])),
  };
}

/** Return the mesh axes whose exposed transfers were recorded. */
export const axesOf = (run) => namesIn(run, "exposed_by_axis");

/** Return the names in a section of the steps' records. */
export function namesIn(run, section) {
  const before = `${section}.`;
  return Object.keys(run.columns).filter((name) => name.startsWith(before)).map((name) => name.slice(before.length));
}

export function drawSummary(run) {
  headline(run);
  budget(run);
  alerts(run);
}

const bold = (text, kind) => el("b", { class: kind, text });

function headline(run) {
  const now = recent(run);
  const line = byId("headline");
  const under = byId("subline");
  if (now.step === null) return;
  if (!now.communication) {
    line.replaceChildren(`A step takes ${seconds(now.step)}; no communication was recorded.`);
    under.textContent = now.communication === 0 ? "One rank alone does not communicate; with telemetry.spans off nothing is recorded." : "";
    return;
  }
  const hidden = 1 - now.exposed / now.communication;
  const share = now.exposed / now.step;
  line.replaceChildren(
    bold(percent(hidden), hidden >= 0.5 ? "good" : ""), " of communication is hidden; ",
    bold(seconds(now.exposed), "bad"), ` of each ${seconds(now.step)} step still waits.`,
  );
  const facts = [`${percent(share, share < 0.1 ? 1 : 0)} of the step is waiting for transfers`];
  const axes = now.axes.filter(([, exposed]) => exposed > 0);
  if (axes.length) facts.push(`exposed by axis: ${axes.map(([axis, exposed]) => `${axis} ${seconds(exposed)}`).join(", ")}`);
  if (now.waiting > 0) facts.push(`ranks wait ${seconds(now.waiting)} for peers`);
  if (now.slowdown !== null) facts.push(`slowdown by overlap: ${lost(now.slowdown)}`);
  const predicted = run.state?.predicted;
  if (typeof predicted?.hidden_fraction === "number") facts.push(`the plan predicted ${percent(predicted.hidden_fraction)} hidden and ${seconds(predicted.step_seconds)} per step`);
  if (typeof predicted?.serial_seconds === "number") facts.push(`without overlap a step was predicted to take ${seconds(predicted.serial_seconds)}`);
  under.textContent = `${facts.join("; ")}. Mean of ${now.count === 1 ? "one step" : `the last ${now.count} steps`} and all ranks.`;
}

/** Return the parts of a step in seconds: measured, predicted, and for a single strand that hides nothing. */
function rows(run) {
  const now = recent(run);
  const found = [];
  if (now.step !== null) found.push(parts({ name: "measured", ...now }));
  const predicted = run.state?.predicted;
  if (typeof predicted?.step_seconds === "number") {
    const [step, compute, exposed, slowdown, communication] = ["step", "compute", "exposed", "slowdown", "communication"].map((name) => predicted[`${name}_seconds`]);
    found.push(parts({ name: "predicted", step, compute, exposed, slowdown, communication }));
    if (typeof predicted.serial_seconds === "number" && typeof predicted.alpha === "number") {
      const waits = predicted.serial_seconds * predicted.alpha;
      found.push(parts({ name: "one strand, predicted", step: predicted.serial_seconds, exposed: waits, communication: waits }));
    }
  }
  return found;
}

/** Return the parts on which a step's seconds were spent. */
export function parts({ name, step, compute, exposed, slowdown, communication, waiting }) {
  const waits = exposed ?? 0;
  const peers = Math.max(0, Math.min(waiting ?? 0, step - waits));
  const computes = Math.min(compute ?? step - waits - peers, step - waits - peers);
  const slow = Math.max(0, Math.min(slowdown ?? 0, computes));
  return { name, step, communication, waits, peers, slow, computes: computes - slow, idle: Math.max(0, step - computes - waits - peers), hidden: Math.max(0, (communication ?? 0) - waits) };
}

/** Draw for each row a bar of the step's parts, and below it a bar of hidden and exposed communication. */
function budget(run) {
  const box = byId("budget");
  const found = rows(run);
  if (!found.length) return;
  const wide = Math.max(280, box.clientWidth) - (box.clientWidth < 660 ? 70 : 230);
  const scale = wide / Math.max(...found.map((row) => Math.max(row.step, row.communication ?? 0)));
  box.replaceChildren(...found.flatMap((row) => {
    const step = bar(scale, [["computes", row.computes], ["slowdown", row.slow], ["waits", row.waits, "stripes"], ["peers", row.peers, "dotted"], ["idle", row.idle]]);
    step.append(el("output", { text: seconds(row.step) }));
    const moving = bar(scale, [["", row.hidden, "hidden"], ["", row.waits, "stripes"]]);
    moving.style.marginLeft = `${Math.max(0, row.computes + row.slow - row.hidden) * scale}px`;
    const name = el("div", { class: "name" }, row.name, el("small", { text: "communication" }));
    return [name, el("div", { role: "img", "aria-label": spoken(row) }, step, moving)];
  }));
}

function spoken(row) {
  return `${row.name}: step ${seconds(row.step)}, computes ${seconds(row.computes + row.slow)}, waits ${seconds(row.waits)} for transfers and ${seconds(row.peers)} for peers, idle ${seconds(row.idle)}, hidden communication ${seconds(row.hidden)}.`;
}

/** Draw parts, [name, seconds, style], side by side; names are shown where there is room. */
function bar(scale, found) {
  const boxes = found.filter(([, value]) => value * scale >= 0.3).map(([name, value, look = name]) => {
    const label = `${name} ${seconds(value)}`;
    const fits = name && value * scale > label.length * 6.6 + 8;
    const box = el("span", { class: look, title: `${name || "communication"}: ${seconds(value)}`, text: fits ? label : "" });
    box.style.width = `${Math.max(0.5, value * scale - 1)}px`;
    return box;
  });
  return el("div", { class: "bar" }, ...boxes);
}

/** Return the run's state, such as running or silent, according to its last records. */
export function status(run) {
  const kinds = ["started", "restarted", "resized", "finished", "failed"];
  const last = run.events.findLast((event) => kinds.includes(event.kind));
  const time = run.columns.time?.at(-1) ?? last?.time ?? null;
  const age = typeof time === "number" && time > 0 ? Date.now() / 1000 - time : null;
  const slowest = Math.max(...(run.columns.seconds ?? []).slice(-20).filter((one) => typeof one === "number"), 1);
  if (last?.kind === "failed") return { name: "failed", kind: "failed", age };
  const complete = run.state?.complete ?? null;
  if (last?.kind === "finished" || (!last && complete !== null)) {
    return { name: complete === false ? "stopped early" : "finished", kind: "finished", age };
  }
  if (age !== null && age > Math.max(60, 8 * slowest)) return { name: "silent", kind: "silent", age };
  return { name: run.columns.step.length ? "running" : "starting", kind: "running", age };
}

const allSteps = (run) => run.state?.config.train?.steps;

/** Return the time since this start of the run, and the remaining time estimated from the last steps. */
function times(run, kind) {
  const begin = run.events.findLast((event) => event.kind === "started" || event.kind === "restarted" || event.kind === "resized");
  const last = run.columns.time?.at(-1);
  const facts = [];
  if (typeof begin?.time === "number" && typeof last === "number") {
    facts.push(`elapsed ${duration((kind === "running" ? Date.now() / 1000 : last) - begin.time)}`);
  }
  const left = (allSteps(run) || 0) - (run.columns.step.at(-1) ?? 0);
  const each = mean((run.columns.wall_seconds ?? []).slice(1).slice(-PACE).map((one, n, all) => one || run.columns.seconds?.at(n - all.length)));
  if (kind === "running" && left > 0 && each !== null) facts.push(`about ${duration(left * each)} left`);
  return facts;
}

export function drawHeader(run) {
  const name = run.state?.name ?? "Braid";
  byId("name").textContent = name;
  document.title = `${name} · Braid`;
  const { name: text, kind, age } = status(run);
  const pill = byId("status");
  pill.textContent = run.connected ? text : "no connection to the server";
  pill.className = `pill ${run.connected ? kind : "silent"}`;
  const done = run.columns.step.at(-1);
  const layout = run.state?.layout;
  const facts = [];
  if (done) facts.push(`step ${done}${allSteps(run) ? ` of ${allSteps(run)}` : ""}`);
  if (age !== null) facts.push(`last step ended ${duration(age)} ago`);
  facts.push(...times(run, kind));
  const ranks = run.state?.cluster.ranks.length;
  if (ranks) facts.push(`${ranks} rank${ranks > 1 ? "s" : ""}`);
  if (layout) facts.push(Object.entries(layout).filter(([, degree]) => degree > 1).map(([axis, degree]) => `${axis} ${degree}`).join(" × "));
  if (run.state?.schedule) facts.push(`schedule ${run.state.schedule.name}`);
  byId("progress").textContent = facts.filter(Boolean).join(" · ");
}

function alerts(run) {
  const found = [...(run.state?.trouble ?? [])];
  const slow = run.ranks?.stragglers ?? [];
  if (slow.length) found.push(`⚠ ${slow.length > 1 ? "Slow ranks" : "Slow rank"}: ${slow.slice(0, 6).map((one) => `${one.rank} (${one.times.toFixed(2)} × the compute time of the others of its stage)`).join(", ")}${slow.length > 6 ? ` and ${slow.length - 6} more` : ""}. All others wait for the slowest.`);
  const line = run.ranks?.line;
  const dropped = (line?.dropped_spans ?? []).reduce((sum, one) => sum + one, 0);
  if (dropped) found.push(`${dropped} spans were dropped by ranks that could not keep up; the timeline has gaps.`);
  const every = Math.max(1, ...(line?.sampled_every ?? [1]));
  if (every > 1) found.push(`Spans of one step in ${every} are recorded.`);
  for (const event of run.events.filter((one) => ["failed", "telemetry"].includes(one.kind)).slice(-3)) found.push(`${event.kind} at step ${event.step}: ${event.text}`);
  if (run.columns.step.length && run.columns.loss?.at(-1) === null) found.push("The loss is not a number.");
  byId("alerts").replaceChildren(...found.map((text) => el("li", { text })));
}
