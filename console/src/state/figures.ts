// The figures of the host, asked for every two seconds while the page can be seen. Owns which part of them a page needs.
//
// Invariant: at most one request for figures is in flight.
import { computed, effect, signal, untracked } from "@preact/signals";
import { type Answer, ApiError, address, type Figures, raw } from "../api/client.ts";
import { route } from "../router.ts";
import { type History, samplesOf } from "./history.ts";
import { type MachineRow, Moments, total } from "./moments.ts";
import { isSignedIn } from "./session.ts";
import { visible } from "./visible.ts";

const EVERY_MS = 2000;
/** There are rates from the second answer on, so that the first pause is short. */
const FIRST_PAUSE_MS = 600;
/** Large answers are asked for less often: this much time for each MB. */
const MS_FOR_A_MB = 1500;
/** The longest pause for an answer that took long: one that was late once does not make all that is shown stale. */
const LATE_PAUSE_MS = 6000;

/** When an answer comes so much later than it should, there are no rates between it and the last. */
const BREAK_MS = 30_000;

/** What the figures are limited to. */
type Scope = { catalog?: string; machine?: string; machines?: false; fields?: string };

const numbers = (group: string, ...names: string[]) => names.map((name) => `${group}.${name}`);
/** What lists of machines show of each: columns need no other. */
export const LISTED = [
  ...numbers("levels", "ram_used_bytes", "ram_limit_bytes", "overflow_used_bytes", "overflow_limit_bytes"),
  ...numbers("levels", "warning", "critical", "full", "degraded", "stalled"),
  ...numbers("counters.guest", "read_bytes", "written_bytes"),
  ...numbers("counters.ram", "read_bytes", "written_bytes"),
  ...numbers("counters.overflow", "read_bytes", "written_bytes"),
].join(",");

const moments = new Moments();
/** Changes with each new moment; what derives from the figures reads it. */
export const tick = signal(0);
/** When the last figures came, in milliseconds. */
export const figuresAt = signal<number | null>(null);
/** Figures that are older than this are stale. */
export const STALE_MS = 8000;
/** Why they could not be read the last time; null if they could. */
export const figuresError = signal<Error | null>(null);
/** When they were asked for first after a time in which the page asked for nothing, in milliseconds. */
let askedSince = Number.POSITIVE_INFINITY;

/**
 * When the stale figures that are shown came, null if none did, and why there are no others if that is known; null if they are not
 * stale.
 */
export function staleFigures(now: number): { at: number | null; error: Error | null } | null {
  const error = figuresError.value;
  const at = figuresAt.value;
  // After such a time they are old, and others will be there at once.
  if (now - Math.max(at ?? 0, askedSince) <= STALE_MS) return null;
  return { at, error };
}

/** What a page needs: an object's page its object, what shows or compares machines all of them, others only the sums. */
const scope = computed<Scope>(() => {
  const [page, name] = route.value.parts;
  if (page === "catalogs" && name && name !== "new") return { catalog: name };
  if (page === "machines" && name) return { machine: name };
  if (page === "machines" || (page === "catalogs" && name === "new")) return { fields: LISTED };
  return { machines: false };
});
const path = computed(() => address("/v1/figures", undefined, scope.value));

export const figures = computed<Figures | undefined>(() => {
  tick.value;
  return moments.last;
});
export const machineRows = computed(() => {
  tick.value;
  return moments.machines();
});
const rowsByName = computed(() => new Map(machineRows.value.map((row) => [row.name, row])));
/** The figures of a machine; undefined if the last set has none of it. */
export const machineRow = (name: string): MachineRow | undefined => rowsByName.value.get(name);
export const catalogRows = computed(() => {
  tick.value;
  return moments.catalogs();
});
/** How many machines exist, of the catalogs that the figures are of; null without figures. */
export const machineCount = computed(() =>
  figures.value ? catalogRows.value.reduce((sum, { counts }) => sum + total(counts), 0) : null,
);

/** Catalogs whose history has been asked for since the last break. */
let seeded = new Set<string>();
const SEEDED_CATALOGS = 24;

/** Fills small pictures with what was before the page was opened, once for each catalog. */
async function seed(): Promise<void> {
  // Only pages that show catalogs one by one have these pictures.
  if (route.peek().parts[0] !== "catalogs") return;
  const begun = seeded;
  for (const name of moments.lastingCatalogs().slice(0, SEEDED_CATALOGS)) {
    if (begun.has(name)) continue;
    begun.add(name);
    try {
      const path = address("/v1/history", undefined, { catalog: name, seconds: 600 });
      const { body } = await raw<History>("GET", path);
      if (begun !== seeded) return;
      moments.seed("catalogs", name, samplesOf(body));
      tick.value++;
    } catch (error) {
      // What the daemon refuses, it would refuse again: there is no history of this catalog.
      if (!(error instanceof ApiError)) begun.delete(name);
    }
    if (begun !== seeded) return;
  }
}

/** Forgets what rates would be made of: they are of one time without a break. */
function restart(): void {
  moments.pause();
  seeded = new Set();
  tick.value++;
}

let timer: ReturnType<typeof setTimeout> | undefined;
let running: AbortController | undefined;
let etag: string | null = null;
/** The pause after the last answer, in milliseconds. */
let pauseMs = EVERY_MS;

function take(answer: Answer<Figures>, tookMs: number): void {
  const before = figuresAt.value;
  const at = Date.now();
  figuresAt.value = at;
  if (before !== null && at - before > pauseMs + tookMs + BREAK_MS) restart();
  if (answer.status === 304) {
    if (before !== null) moments.repeat(at - before);
    tick.value++;
    pauseMs = EVERY_MS;
  } else {
    etag = answer.etag;
    const isFirst = moments.last === undefined;
    if (moments.add(answer.body)) tick.value++;
    const mb = answer.body.machines.length / 1000;
    pauseMs = Math.max(isFirst ? FIRST_PAUSE_MS : EVERY_MS, mb * MS_FOR_A_MB, Math.min(tookMs * 4, LATE_PAUSE_MS));
  }
  void seed();
}

async function poll(): Promise<void> {
  clearTimeout(timer);
  running?.abort();
  const abort = new AbortController();
  running = abort;
  let wait = EVERY_MS;
  try {
    const started = performance.now();
    const headers: Record<string, string> = etag ? { "If-None-Match": etag } : {};
    const answer = await raw<Figures>("GET", path.value, { headers, signal: abort.signal });
    if (abort.signal.aborted) return;
    take(answer, performance.now() - started);
    wait = pauseMs;
    figuresError.value = null;
  } catch (error) {
    if (abort.signal.aborted) return;
    figuresError.value = error instanceof Error ? error : new Error(String(error));
  }
  timer = setTimeout(() => void poll(), togetherAfter(wait));
}

/**
 * When to ask next: at a multiple of the interval by the clock, so that all consoles ask at the same moments. The daemon reads the
 * disks once for who asks within 0.4 s: ten consoles cost it little more than one.
 */
export function togetherAfter(wait: number, now = Date.now()): number {
  if (wait < EVERY_MS) return wait;
  return Math.round((now + wait) / EVERY_MS) * EVERY_MS - now;
}

/** Starts to poll, for as long as the page lives. */
export function startFigures(): void {
  let last = "";
  effect(() => {
    const isOn = isSignedIn.value && visible.value;
    const next = path.value;
    untracked(() => {
      if (next !== last) {
        // Another part of the figures: its moments are not those of before.
        last = next;
        etag = null;
        moments.clear();
        seeded = new Set();
        tick.value++;
      }
      if (isOn) {
        askedSince = Math.min(askedSince, Date.now());
        return void poll();
      }
      askedSince = Number.POSITIVE_INFINITY;
      clearTimeout(timer);
      running?.abort();
      restart();
    });
  });
}
