// What the server knows, fetched when it says that something is new. Only the newest state matters: what a slow
// page misses is old by the time that it looks again.

export const RANKS_AT_ONCE = 16;
const MOST_STEPS_OF_RANKS = 96;

const keyOf = (step, rank) => `${step}:${Math.floor(rank / RANKS_AT_ONCE) * RANKS_AT_ONCE}`;
const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);
const latest = ({ end }) => end.reduce((most, one) => Math.max(most, one), 0);

/** A step of some ranks as the server tells it (`timeline_view.py`): ranks by number, each with the places of its
 * spans by lane and with the time at which all is over. */
function prepared(step) {
  const ranks = step.ranks.map((own) => {
    const lanes = [[], [], []];
    own.spans.label.forEach((label, span) => lanes[step.labels[label].lane].push(span));
    return [own.rank, { ...own, lanes, over: Math.max(latest(own.spans), latest(own.waits)) }];
  });
  return { ...step, ranks: new Map(ranks) };
}

export class Run extends EventTarget {
  constructor() {
    super();
    this.state = null;
    this.columns = { step: [] };
    this.events = [];
    this.ranks = null;
    this.visits = null; // visits of experts in the newest step that records them: layers, and a row for each
    this.traced = []; // first and last step with spans
    this.connected = false;
    this.epoch = 0;
    this._have = {};
    this._wanted = null;
    this._busy = false;
    this._steps = new Map();
    this._asked = new Set();
  }

  start() {
    const source = new EventSource("api/events");
    source.onmessage = (message) => {
      this._wanted = JSON.parse(message.data);
      this._fetch();
    };
    source.onopen = () => this._tell("connection", true);
    source.onerror = () => this._tell("connection", false);
  }

  _tell(what, connected = this.connected) {
    this.connected = connected;
    this.dispatchEvent(new CustomEvent("change", { detail: what }));
  }

  async _fetch() {
    if (this._busy) return;
    this._busy = true;
    try {
      while (this._wanted && !same(this._wanted, this._have)) {
        const wanted = this._wanted;
        if (wanted.reader !== this._have.reader) {
          // Another server: its version numbers are unrelated to the former ones.
          this._have = { reader: wanted.reader };
          this.epoch = 0;
          this._steps.clear();
        }
        const differs = (name) => !same(wanted[name], this._have[name]);
        if (differs("state")) {
          this.state = await this._json("api/state");
          this._tell("state");
        }
        if (differs("metrics") || differs("events")) {
          await this._takeMetrics();
          this._tell("metrics");
        }
        if (differs("ranks")) {
          this.ranks = await this._json("api/ranks");
          this._tell("ranks");
        }
        if (differs("trace")) {
          const before = this.traced.at(-1);
          this.traced = wanted.trace.slice(1);
          if (this.traced.at(-1) === before) this._forget(before);
          this._tell("trace");
        }
        this._have = wanted;
      }
    } catch (error) {
      this._tell("connection", false);
      setTimeout(() => this._fetch(), 1000);
    } finally {
      this._busy = false;
    }
  }

  async _json(address) {
    const answer = await fetch(address);
    if (!answer.ok) throw new Error(`${address}: ${answer.status}`);
    return answer.json();
  }

  async _takeMetrics() {
    const news = await this._json(`api/metrics?after=${this.columns.step.at(-1) ?? 0}&epoch=${this.epoch}`);
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
    this.epoch = news.epoch;
    this.events = news.events;
  }

  async ranksOf(step) {
    return this._json(`api/ranks?step=${step}`);
  }

  /** Return a step's columns for the ranks around `rank`; undefined if they are not loaded. */
  held(step, rank) {
    return this._steps.get(keyOf(step, rank));
  }

  /** Return the steps for which some ranks' columns are loaded, in order. */
  heldSteps() {
    return [...new Set([...this._steps.keys()].map((key) => Number(key.split(":")[0])))].sort((a, b) => a - b);
  }

  /** Return columns like `held`; request them if they are not loaded. */
  step(step, rank) {
    const key = keyOf(step, rank);
    const found = this._steps.get(key);
    if (found) {
      this._steps.delete(key); // move to the end of the order, as the last used
      this._steps.set(key, found);
    }
    if (!found || found.stale) this._ask(key);
    return found;
  }

  async _ask(key) {
    if (this._asked.has(key)) return;
    const [step, first] = key.split(":");
    this._asked.add(key);
    try {
      const answer = await fetch(`api/timeline?step=${step}&ranks=${first}`);
      if (!answer.ok) return;
      const gone = answer.status === 204;
      this._steps.set(key, gone ? { ranks: new Map(), labels: [], missing: true } : prepared(await answer.json()));
      while (this._steps.size > MOST_STEPS_OF_RANKS) this._steps.delete(this._steps.keys().next().value);
      this._tell("spans");
    } catch {
      // The connection is lost; the page requests again at its next drawing.
    } finally {
      this._asked.delete(key);
    }
  }

  _forget(step) {
    for (const [key, value] of this._steps) if (key.startsWith(`${step}:`)) value.stale = true;
  }
}
