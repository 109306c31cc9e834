// What the server knows, fetched when it says that something is new. Only the newest state matters: what a slow
// page misses is old by the time that it looks again.

const RANKS_AT_ONCE = 16;
const MOST_STEPS_OF_RANKS = 96;

const keyOf = (step, rank) => `${step}:${Math.floor(rank / RANKS_AT_ONCE) * RANKS_AT_ONCE}`;
const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);
const latest = ({ end }) => end.reduce((most, time) => Math.max(most, time), 0);

/** A step of some ranks as the server tells it (`timeline_view.py`): ranks by number, each with the places of its
 * spans by lane and with the time at which all is over. */
function prepared(step) {
  const ranks = step.ranks.map((columns) => {
    const lanes = [[], [], []];
    columns.spans.label.forEach((label, span) => lanes[step.labels[label].lane].push(span));
    return [columns.rank, { ...columns, lanes, over: Math.max(latest(columns.spans), latest(columns.waits)) }];
  });
  return { ...step, ranks: new Map(ranks) };
}

async function json(address) {
  const answer = await fetch(address);
  if (!answer.ok) throw new Error(`${address}: ${answer.status}`);
  return answer.status === 204 ? null : answer.json();
}

/** The data of a run. Dispatches a "change" event, whose detail lists what is new: connection, state, metrics, events,
 * ranks, trace (which steps have spans), spans (of a step that was asked for). */
export class Run extends EventTarget {
  state = null;
  columns = { step: [] };
  events = [];
  ranks = null;
  visits = null; // visits of experts in the newest step that records them: layers, and a row for each
  traced = []; // first and last step with spans
  connected = false;
  _epoch = 0;
  _have = {};
  _wanted = {};
  _busy = false;
  _steps = new Map();
  _asked = new Set();

  start() {
    const source = new EventSource("api/events");
    source.onmessage = (message) => {
      this._wanted = JSON.parse(message.data);
      this._fetch();
    };
    source.onopen = () => this._connect(true);
    source.onerror = () => this._connect(false);
  }

  _connect(connected) {
    this.connected = connected;
    this._tell("connection");
  }

  _tell(...what) {
    this.dispatchEvent(new CustomEvent("change", { detail: what }));
  }

  async _fetch() {
    if (this._busy) return;
    this._busy = true;
    try {
      while (!same(this._wanted, this._have)) {
        const wanted = this._wanted;
        if (wanted.reader !== this._have.reader) {
          // Another server: its version numbers are unrelated to the former ones.
          this._have = {};
          this._epoch = 0;
          this._steps.clear();
        }
        const changed = Object.keys(wanted).filter((name) => !same(wanted[name], this._have[name]));
        if (changed.includes("state")) this.state = await json("api/state");
        if (changed.includes("metrics") || changed.includes("events")) await this._takeMetrics();
        if (changed.includes("ranks")) this.ranks = await json("api/ranks");
        if (changed.includes("trace")) this._takeTrace(wanted.trace.slice(1));
        this._have = wanted;
        this._tell(...changed);
      }
    } catch {
      this._connect(false);
      setTimeout(() => this._fetch(), 1000);
    } finally {
      this._busy = false;
    }
  }

  async _takeMetrics() {
    const news = await json(`api/metrics?after=${this.columns.step.at(-1) ?? 0}&epoch=${this._epoch}`);
    if (news.anew) {
      this.columns = { step: [] };
      this.visits = null;
      this._steps.clear();
    }
    for (const row of news.rows) {
      const before = this.columns.step.length;
      for (const name of Object.keys(row)) this.columns[name] ??= new Array(before).fill(null);
      for (const [name, values] of Object.entries(this.columns)) values.push(row[name] ?? null);
    }
    this.visits = news.visits ?? this.visits;
    this._epoch = news.epoch;
    this.events = news.events;
  }

  _takeTrace(traced) {
    const before = this.traced.at(-1);
    this.traced = traced;
    if (traced.at(-1) !== before) return;
    // More ranks may have the step now.
    for (const key of this._steps.keys()) if (key.startsWith(`${before}:`)) this._steps.delete(key);
  }

  /** Return a step's columns for the ranks around `rank`; undefined if they are not loaded. */
  held(step, rank) {
    return this._steps.get(keyOf(step, rank));
  }

  /** Return columns like `held`; request them if they are not loaded. */
  step(step, rank) {
    const key = keyOf(step, rank);
    if (!this._steps.has(key)) this._ask(key);
    return this._steps.get(key);
  }

  async _ask(key) {
    if (this._asked.has(key)) return;
    const [step, first] = key.split(":");
    this._asked.add(key);
    try {
      const answer = await json(`api/timeline?step=${step}&ranks=${first}`);
      this._steps.set(key, answer ? prepared(answer) : { ranks: new Map(), labels: [], missing: true });
      while (this._steps.size > MOST_STEPS_OF_RANKS) this._steps.delete(this._steps.keys().next().value);
      this._tell("spans");
    } catch {
      // The connection is lost; the page requests again at its next drawing.
    } finally {
      this._asked.delete(key);
    }
  }
}
