// What the figures say over time: rates between the last two moments, and when a write cache will be full. The rules are
// those of `spillway top`, so that both say the same.
//
// Invariant: a rate is of the time between two moments of the same daemon, without a break; without two there is none. What a row
// derives is computed when it is first looked at: of hundreds of machines, few are on the screen.
import type { Counters, Figures, Levels, Schemas } from "../api/client.ts";

/** How far back growth is looked at to say when a cache is full. */
const TREND_SECONDS = 30;
/** Samples of the small charts in lists: ten minutes at one in two seconds. */
const SAMPLES = 300;
/** The same list each time: what shows it is not drawn anew. */
const NO_SAMPLES: Sample[] = [];
/** With more objects than this, none has samples: they would cost more than they show. */
const SAMPLED_OBJECTS = 200;

export interface PlaneRate {
  read: number;
  written: number;
  reads: number;
  writes: number;
}

export interface Rates {
  guest: PlaneRate;
  ram: PlaneRate;
  overflow: PlaneRate;
  base: PlaneRate;
  /** Mean time of a guest's request in nanoseconds; null if there was none. */
  latencyNs: number | null;
  stalls: number;
  /** Seconds that requests waited for rate limits, for each second. */
  throttled: number;
  /** Bytes that moved from the RAM tier to the overflow. */
  evicted: number;
}

/** What small charts show of a moment: rates by the second, and levels. */
export interface Sample {
  /** Seconds since the epoch. */
  time: number;
  guestRead: number;
  guestWritten: number;
  ramRead: number;
  ramWritten: number;
  overflowRead: number;
  overflowWritten: number;
  baseRead: number;
  stalls: number;
  ramUsed: number;
  overflowUsed: number;
  fill: number;
}

export interface Row {
  name: string;
  catalog: string;
  /** Share of both tiers that is used, from 0 to 1. */
  fill: number;
  levels: Required<Levels>;
  counters: Counters;
  sparedBytes: number;
  /** null: there are not two moments yet. */
  rates: Rates | null;
  /** null: it does not grow. */
  secondsToFull: number | null;
  samples: Sample[];
}

export interface MachineRow extends Row {
  phase: Schemas["Phase"];
  ready: boolean;
  claimed: boolean;
  unresponsive: boolean;
}

export interface CatalogRow extends Row {
  counts: Required<Schemas["MachineCounts"]>;
  warm: number;
  disks: number;
  unresponsiveDisks: number;
}

const NO_LEVELS: Required<Levels> = {
  chunk_wait_p99_ns: 0,
  chunks_missing: 0,
  critical: 0,
  degraded: 0,
  full: 0,
  inflight: 0,
  map_bytes: 0,
  overflow_file_bytes: 0,
  overflow_limit_bytes: 0,
  overflow_used_bytes: 0,
  ram_limit_bytes: 0,
  ram_used_bytes: 0,
  stalled: 0,
  waiting: 0,
  warning: 0,
};

export function fill(levels: Levels): number {
  const limit = (levels.ram_limit_bytes ?? 0) + (levels.overflow_limit_bytes ?? 0);
  return limit === 0 ? 0 : ((levels.ram_used_bytes ?? 0) + (levels.overflow_used_bytes ?? 0)) / limit;
}

/** Seconds until both tiers are full if they go on growing as they did; null if they do not grow. */
export function secondsToFull(now: Levels, before: Levels, seconds: number): number | null {
  const used = (l: Levels) => (l.ram_used_bytes ?? 0) + (l.overflow_used_bytes ?? 0);
  const limit = (now.ram_limit_bytes ?? 0) + (now.overflow_limit_bytes ?? 0);
  const grown = used(now) - used(before);
  if (grown <= 0 || limit === 0 || seconds <= 0) return null;
  return Math.floor((Math.max(0, limit - used(now)) * seconds) / grown);
}

const since = (now: number | undefined, before: number | undefined) =>
  Math.max(0, (now ?? 0) - (before ?? 0));

export function ratesBetween(now: Counters, before: Counters, seconds: number): Rates {
  const plane = (name: "guest" | "ram" | "overflow" | "base"): PlaneRate => {
    const a: Schemas["PlaneCounters"] = now[name] ?? {};
    const b: Schemas["PlaneCounters"] = before[name] ?? {};
    return {
      read: since(a.read_bytes, b.read_bytes) / seconds,
      written: since(a.written_bytes, b.written_bytes) / seconds,
      reads: since(a.reads, b.reads) / seconds,
      writes: since(a.writes, b.writes) / seconds,
    };
  };
  const requests = since(now.read_count, before.read_count) + since(now.write_count, before.write_count);
  const time = since(now.read_ns, before.read_ns) + since(now.write_ns, before.write_ns);
  return {
    guest: plane("guest"),
    ram: plane("ram"),
    overflow: plane("overflow"),
    base: plane("base"),
    latencyNs: requests > 0 ? time / requests : null,
    stalls: since(now.stalls, before.stalls) / seconds,
    throttled: since(now.throttled_ns, before.throttled_ns) / 1e9 / seconds,
    evicted: (since(now.evicted_blocks, before.evicted_blocks) * 4096) / seconds,
  };
}

/** Adds the rates of several objects. */
export function sumRates(all: (Rates | null)[]): Rates | null {
  const known = all.filter((r): r is Rates => r !== null);
  if (known.length === 0) return null;
  const zero = (): PlaneRate => ({ read: 0, written: 0, reads: 0, writes: 0 });
  const sum: Rates = {
    guest: zero(),
    ram: zero(),
    overflow: zero(),
    base: zero(),
    latencyNs: null,
    stalls: 0,
    throttled: 0,
    evicted: 0,
  };
  for (const one of known) {
    for (const plane of ["guest", "ram", "overflow", "base"] as const) {
      for (const key of ["read", "written", "reads", "writes"] as const) sum[plane][key] += one[plane][key];
    }
    sum.stalls += one.stalls;
    sum.throttled += one.throttled;
    sum.evicted += one.evicted;
  }
  return sum;
}

type Parts = { counters: Counters; levels: Levels };

/** Earlier moments, by the names of their objects. */
interface Comparison {
  /** Seconds since `before`, the moment that rates are counted from; null: there is none. */
  seconds: number;
  before: Map<string, Parts> | null;
  /** Seconds since `oldest`, the moment that growth is counted from; null: there is none. */
  trendSeconds: number;
  oldest: Map<string, Parts> | null;
  samples(name: string): Sample[];
}

function ratesOf(object: Parts & { name: string }, { before, seconds }: Comparison): Rates | null {
  return before && ratesBetween(object.counters, before.get(object.name)?.counters ?? {}, seconds);
}

function secondsToFullOf(
  object: Parts & { name: string },
  { oldest, trendSeconds }: Comparison,
): number | null {
  const was = oldest?.get(object.name);
  return was ? secondsToFull(object.levels, was.levels, trendSeconds) : null;
}

/** The row of a machine. */
class MachineFigures implements MachineRow {
  private knownLevels: Required<Levels> | undefined;
  private knownRates: Rates | null | undefined;

  constructor(
    private readonly machine: Figures["machines"][number],
    private readonly comparison: Comparison,
  ) {}

  get name() {
    return this.machine.name;
  }
  get catalog() {
    return this.machine.catalog;
  }
  get phase() {
    return this.machine.phase;
  }
  get ready() {
    return this.machine.ready;
  }
  get claimed() {
    return this.machine.claimed;
  }
  get unresponsive() {
    return this.machine.unresponsive;
  }
  get counters() {
    return this.machine.counters;
  }
  get sparedBytes() {
    return this.machine.spared_bytes;
  }
  get fill() {
    return fill(this.machine.levels);
  }
  get levels() {
    this.knownLevels ??= { ...NO_LEVELS, ...this.machine.levels };
    return this.knownLevels;
  }
  get rates() {
    if (this.knownRates === undefined) this.knownRates = ratesOf(this.machine, this.comparison);
    return this.knownRates;
  }
  get secondsToFull() {
    return secondsToFullOf(this.machine, this.comparison);
  }
  get samples() {
    return this.comparison.samples(this.machine.name);
  }
}

/** The moments that rows are made of. */
export class Moments {
  private moments: Figures[] = [];
  /** Whether the last moment only says that nothing has changed since the one before. */
  private isRepeat = false;
  /** Whether the next moment follows after a break. */
  private isPaused = false;
  private samples = new Map<string, Sample[]>();

  /** Adds the moment so many milliseconds after the last, at which nothing had changed. */
  repeat(milliseconds: number): void {
    const last = this.last;
    if (!last || milliseconds <= 0) return;
    this.add({ ...last, time: new Date(Date.parse(last.time) + milliseconds).toISOString() });
    this.isRepeat = true;
  }

  /** Adds a moment. `false`: it is the one that was there already. */
  add(figures: Figures): boolean {
    // The time of a repeated moment is of another clock: it gives way to one that is not after it.
    if (this.isRepeat && this.last && Date.parse(figures.time) <= Date.parse(this.last.time))
      this.moments.pop();
    this.isRepeat = false;
    if (this.isPaused) this.clear();
    const last = this.last;
    // The counters of another daemon begin anew, and the clock may have been set back.
    if (last && (last.since !== figures.since || Date.parse(figures.time) < Date.parse(last.time)))
      this.clear();
    if (this.last?.time === figures.time) return false;
    this.moments.push(figures);
    while (this.moments.length > 2 && this.passed(this.moments[1]) >= TREND_SECONDS) this.moments.shift();
    this.sample();
    return true;
  }

  /** Begins a break: what is known stays, but nothing is compared with it any more. */
  pause(): void {
    this.moments = this.moments.slice(-1);
    this.samples.clear();
    this.isPaused = true;
  }

  clear(): void {
    this.moments = [];
    this.samples.clear();
    this.isPaused = false;
  }

  get last(): Figures | undefined {
    return this.moments.at(-1);
  }

  /** Catalogs that have samples and are in the last two moments: one of a single moment may have been deleted since. */
  lastingCatalogs(): string[] {
    const was = this.indexOf(this.moments.at(-2), "catalogs");
    if (was.size > SAMPLED_OBJECTS) return [];
    return (this.last?.catalogs ?? []).map((c) => c.name).filter((name) => was.has(name));
  }

  private passed(from: Figures | undefined): number {
    return from && this.last ? (Date.parse(this.last.time) - Date.parse(from.time)) / 1000 : 0;
  }

  private sample(): void {
    const before = this.moments.at(-2);
    const seconds = this.passed(before);
    if (!before || !this.last || seconds <= 0) return;
    const time = Date.parse(this.last.time) / 1000;
    // Of what is gone, nothing is kept.
    const kept = this.samples;
    this.samples = new Map();
    for (const kind of ["catalogs", "machines"] as const) {
      const now: (Parts & { name: string })[] = this.last[kind];
      if (now.length > SAMPLED_OBJECTS) continue;
      const was = this.indexOf(before, kind);
      for (const object of now) {
        const rates = ratesBetween(object.counters, was.get(object.name)?.counters ?? {}, seconds);
        const key = `${kind}/${object.name}`;
        const samples = kept.get(key) ?? [];
        // Another list, not a longer one: whoever shows it sees that it has changed.
        const sample = {
          time,
          guestRead: rates.guest.read,
          guestWritten: rates.guest.written,
          ramRead: rates.ram.read,
          ramWritten: rates.ram.written,
          overflowRead: rates.overflow.read,
          overflowWritten: rates.overflow.written,
          baseRead: rates.base.read,
          stalls: rates.stalls,
          ramUsed: object.levels.ram_used_bytes ?? 0,
          overflowUsed: object.levels.overflow_used_bytes ?? 0,
          fill: fill(object.levels),
        };
        this.samples.set(key, [...samples.slice(1 - SAMPLES), sample]);
      }
    }
  }

  /** Puts what the daemon knows of the time before in front of an object's samples. */
  seed(kind: "catalogs" | "machines", name: string, earlier: Sample[]): void {
    const key = `${kind}/${name}`;
    const samples = this.samples.get(key) ?? [];
    const first = samples[0]?.time ?? Number.POSITIVE_INFINITY;
    this.samples.set(key, [...earlier.filter((s) => s.time < first), ...samples]);
  }

  /** What rows of the last moment are compared with. */
  private comparison(kind: "catalogs" | "machines"): Comparison {
    const before = this.moments.at(-2);
    const oldest = this.moments[0];
    const seconds = this.passed(before);
    const trendSeconds = this.passed(oldest);
    return {
      seconds,
      before: before && seconds > 0 ? this.indexOf(before, kind) : null,
      trendSeconds,
      oldest: oldest && trendSeconds > 0 ? this.indexOf(oldest, kind) : null,
      samples: (name) => this.samples.get(`${kind}/${name}`) ?? NO_SAMPLES,
    };
  }

  private indexes = new WeakMap<Figures, Record<"catalogs" | "machines", Map<string, Parts>>>();
  private indexOf(figures: Figures | undefined, kind: "catalogs" | "machines"): Map<string, Parts> {
    if (!figures) return new Map();
    let both = this.indexes.get(figures);
    if (!both) {
      both = { catalogs: index(figures.catalogs), machines: index(figures.machines) };
      this.indexes.set(figures, both);
    }
    return both[kind];
  }

  machines(): MachineRow[] {
    const comparison = this.comparison("machines");
    return (this.last?.machines ?? []).map((machine) => new MachineFigures(machine, comparison));
  }

  catalogs(): CatalogRow[] {
    const comparison = this.comparison("catalogs");
    return (this.last?.catalogs ?? []).map((c) => ({
      name: c.name,
      catalog: c.name,
      fill: fill(c.levels),
      levels: { ...NO_LEVELS, ...c.levels },
      counters: c.counters,
      sparedBytes: c.spared_bytes,
      rates: ratesOf(c, comparison),
      secondsToFull: secondsToFullOf(c, comparison),
      samples: comparison.samples(c.name),
      counts: {
        available: 0,
        claimed: 0,
        failed: 0,
        ready: 0,
        running: 0,
        starting: 0,
        stopped: 0,
        stopping: 0,
        waiting: 0,
        ...c.machines,
      },
      warm: c.warm,
      disks: c.disks,
      unresponsiveDisks: c.unresponsive_disks,
    }));
  }
}

function index<T extends { name: string }>(objects: T[]): Map<string, T> {
  return new Map(objects.map((object) => [object.name, object]));
}

/** Machines of a catalog that are not off. */
export function notOff(counts: Required<Schemas["MachineCounts"]>): number {
  return total(counts) - counts.stopped;
}

/** All machines of a catalog, whatever their phase. */
export function total(counts: Required<Schemas["MachineCounts"]>): number {
  return counts.stopped + counts.waiting + counts.starting + counts.running + counts.stopping + counts.failed;
}
