// The page's head and summary: hidden and exposed communication, in words and as bars to one scale.

import { byId, duration, el, filledBox, lost, mean, percent, seconds } from "./dom.js";

const WINDOW = 10;
const PACE = 50; // number of last steps, with their saves and validations, from which the remaining time is estimated

/** Return the names in a section of the steps' records. */
export function namesIn(run, section) {
  const before = `${section}.`;
  return Object.keys(run.columns).filter((name) => name.startsWith(before)).map((name) => name.slice(before.length));
}

/** Return means over the newest steps. */
function recent(run) {
  const { columns } = run;
  const count = columns.step.length;
  const from = Math.max(count > 1 ? 1 : 0, count - WINDOW); // the first step also warms up
  const of = (name) => mean((columns[name] ?? []).slice(from));
  const [step, communication, exposed, slowdown, waiting] = ["", "communication_", "exposed_", "slowdown_", "waiting_"].map((name) => of(`${name}seconds`));
  const compute = mean(columns.step.slice(from).map((at) => run.ranks?.compute[at]));
  const axes = namesIn(run, "exposed_by_axis").map((axis) => [axis, of(`exposed_by_axis.${axis}`)]).filter(([, value]) => value > 0);
  return { count: count - from, step, communication, exposed, slowdown, waiting, compute, axes };
}

export function drawSummary(run) {
  const now = recent(run);
  if (now.step !== null) {
    headline(now);
    budget(now, run.state?.predicted ?? {});
  }
  alerts(run);
}

function headline(now) {
  const line = byId("headline");
  const under = byId("subline");
  if (!now.communication) {
    line.replaceChildren(`A step takes ${seconds(now.step)}; no communication was recorded.`);
    under.textContent = now.communication === 0 ? "One rank alone does not communicate; with telemetry.spans off nothing is recorded." : "";
    return;
  }
  const hidden = 1 - now.exposed / now.communication;
  const share = now.exposed / now.step;
  line.replaceChildren(
    el("b", { class: hidden >= 0.5 ? "good" : "", text: percent(hidden) }), " of communication is hidden; ",
    el("b", { class: "bad", text: seconds(now.exposed) }), ` of each ${seconds(now.step)} step still waits.`,
  );
  const facts = [`${percent(share, share < 0.1 ? 1 : 0)} of the step is waiting for transfers`];
  if (now.axes.length) facts.push(`exposed by axis: ${now.axes.map(([axis, exposed]) => `${axis} ${seconds(exposed)}`).join(", ")}`);
  if (now.waiting > 0) facts.push(`ranks wait ${seconds(now.waiting)} for peers`);
  if (now.slowdown !== null) facts.push(`slowdown by overlap: ${lost(now.slowdown)}`);
  under.textContent = `${facts.join("; ")}. Mean of ${now.count === 1 ? "one step" : `the last ${now.count} steps`} and all ranks.`;
}

/** Return the parts on which a step's seconds were spent: [class of style.css, seconds, name]. */
export function partsOf({ step, compute, exposed, slowdown, waiting }) {
  const waits = exposed ?? 0;
  const peers = Math.max(0, Math.min(waiting ?? 0, step - waits));
  const computes = Math.min(compute ?? step - waits - peers, step - waits - peers);
  const slow = Math.max(0, Math.min(slowdown ?? 0, computes));
  return [["computes", computes - slow, "computes"], ["slowdown", slow, "slowdown"], ["stripes", waits, "waits"], ["dotted", peers, "peers"], ["idle", Math.max(0, step - computes - waits - peers), "idle"]];
}

/** Draw bars of the step's parts: measured, predicted, and for a single strand, which hides nothing. Below each lies a
 * bar of its hidden and exposed communication. */
function budget(measured, predicted) {
  const [step, compute, exposed, slowdown, communication] = ["step", "compute", "exposed", "slowdown", "communication"].map((name) => predicted[`${name}_seconds`]);
  const waits = predicted.serial_seconds * predicted.alpha;
  const rows = [
    ["measured", measured],
    ["predicted", { step, compute, exposed, slowdown, communication }],
    ["one strand, predicted", { step: predicted.serial_seconds, exposed: waits, communication: waits }],
  ].filter(([, times]) => Number.isFinite(times.step) && !Number.isNaN(times.exposed));
  const longest = Math.max(...rows.map(([, times]) => Math.max(times.step, times.communication ?? 0)));
  byId("budget").replaceChildren(...rows.flatMap(([name, times]) => {
    const parts = partsOf(times);
    const hidden = Math.max(0, (times.communication ?? 0) - (times.exposed ?? 0));
    const before = Math.max(0, parts[0][1] + parts[1][1] - hidden);
    const moving = [["gap", before, ""], ["hidden", hidden, ""], ["stripes", times.exposed ?? 0, ""]];
    const spoken = [...parts, ["", hidden, "hidden communication"]].map(([, value, part]) => `${part} ${seconds(value)}`).join(", ");
    return [el("div", { class: "name" }, name, el("small", { text: "communication" })), el("div", { role: "img", "aria-label": `${name}: step ${seconds(times.step)}, ${spoken}` }, bar(parts, longest, seconds(times.step)), bar(moving, longest))];
  }));
}

/** Draw parts side by side; the name of a part is shown where there is room. */
function bar(parts, longest, end = "") {
  const boxes = parts.map(([look, value, name]) => {
    const text = `${name} ${seconds(value)}`;
    return filledBox(look, { width: `${(value / longest) * 100}%` }, text, name && value > 0.11 * longest ? text : "");
  });
  return el("div", { class: "bar" }, ...boxes, el("output", { text: end }));
}

/** Return the run's state, such as running or silent, according to its last records. */
function status(run) {
  const last = run.events.findLast(({ kind }) => ["started", "restarted", "resized", "finished", "failed"].includes(kind));
  const time = run.columns.time?.at(-1) ?? last?.time;
  const age = time > 0 ? Date.now() / 1000 - time : null;
  const slowest = Math.max(...(run.columns.seconds ?? []).slice(-20), 1);
  const complete = run.state?.complete ?? null;
  if (last?.kind === "failed") return ["failed", "failed", age];
  if (last?.kind === "finished" || (!last && complete !== null)) return [complete === false ? "stopped early" : "finished", "finished", age];
  if (age > Math.max(60, 8 * slowest)) return ["silent", "silent", age];
  return [run.columns.step.length ? "running" : "starting", "running", age];
}

/** Return the time since this start of the run, and the remaining time estimated from the last steps. */
function times({ events, columns, state }, running) {
  const begin = events.findLast(({ kind }) => ["started", "restarted", "resized"].includes(kind))?.time;
  const last = running ? Date.now() / 1000 : columns.time?.at(-1);
  const left = (state?.config.train?.steps ?? 0) - (columns.step.at(-1) ?? 0);
  const each = mean(columns.step.map((_, n) => columns.wall_seconds?.[n] || columns.seconds?.[n]).slice(1).slice(-PACE));
  return [begin && last && `elapsed ${duration(last - begin)}`, running && left > 0 && each !== null && `about ${duration(left * each)} left`];
}

export function drawHeader(run) {
  const { state, columns } = run;
  const [text, kind, age] = status(run);
  byId("name").textContent = state?.name ?? "Braid";
  document.title = `${state?.name ?? "Braid"} · Braid`;
  byId("status").textContent = run.connected ? text : "no connection to the server";
  byId("status").className = `pill ${run.connected ? kind : "silent"}`;
  const steps = state?.config.train?.steps;
  byId("progress").textContent = [
    columns.step.length && `step ${columns.step.at(-1)}${steps ? ` of ${steps}` : ""}`,
    age !== null && `last step ended ${duration(age)} ago`,
    ...times(run, kind === "running"),
  ].filter(Boolean).join(" · ");
}

function alerts(run) {
  const texts = [...(run.state?.trouble ?? [])];
  const { stragglers = [], line } = run.ranks ?? {};
  if (stragglers.length) texts.push(`⚠ ${stragglers.length > 1 ? "Slow ranks" : "Slow rank"}: ${stragglers.slice(0, 6).map(({ rank, times: ratio }) => `${rank} (${ratio.toFixed(2)} × the compute time of the others of its stage)`).join(", ")}${stragglers.length > 6 ? ` and ${stragglers.length - 6} more` : ""}. All others wait for the slowest.`);
  const dropped = (line?.dropped_spans ?? []).reduce((sum, count) => sum + count, 0);
  if (dropped) texts.push(`${dropped} spans were dropped by ranks that could not keep up; the timeline has gaps.`);
  const every = Math.max(1, ...(line?.sampled_every ?? []));
  if (every > 1) texts.push(`Spans of one step in ${every} are recorded.`);
  for (const { kind, step, text } of run.events.filter((event) => ["failed", "telemetry"].includes(event.kind)).slice(-3)) texts.push(`${kind} at step ${step}: ${text}`);
  if (run.columns.step.length && run.columns.loss?.at(-1) === null) texts.push("The loss is not a number.");
  byId("alerts").replaceChildren(...texts.map((text) => el("li", { text })));
}
