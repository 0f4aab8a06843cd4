// The figures of the host, asked for every two seconds while the page can be seen. Owns which part of them a page needs.
//
// Invariant: at most one request for figures is in flight.
import { computed, effect, signal, untracked } from "@preact/signals";
import { ApiError, address, type Figures, raw } from "../api/client.ts";
import { route } from "../router.ts";
import { type History, samplesOf } from "./history.ts";
import { Moments } from "./moments.ts";
import { session } from "./session.ts";
import { visible } from "./visible.ts";

const EVERY_MS = 2000;
/** Large answers are asked for less often: this much time for each MB. */
const MS_FOR_A_MB = 1500;

/** What the figures are limited to. */
type Scope = { catalog?: string; machine?: string; machines?: false };

const moments = new Moments();
/** Changes with each new moment; what derives from the figures reads it. */
export const tick = signal(0);
/** When the last figures came, in milliseconds. */
export const figuresAt = signal<number | null>(null);

/** What a page needs: an object's page its object, what shows or compares machines all of them, others only the sums. */
const scope = computed<Scope>(() => {
  const [page, name] = route.value.parts;
  if (page === "catalogs" && name && name !== "new") return { catalog: name };
  if (page === "machines" && name) return { machine: name };
  if (page === "machines" || (page === "catalogs" && name === "new")) return {};
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
export const catalogRows = computed(() => {
  tick.value;
  return moments.catalogs();
});

/** Catalogs whose history has been asked for. */
const seeded = new Set<string>();
const SEEDED_CATALOGS = 24;
let hasHistory = true;

/** Fills small pictures with what was before the page was opened, once for each catalog. */
async function seed(): Promise<void> {
  // Only pages that show catalogs one by one have these pictures.
  if (route.peek().parts[0] !== "catalogs") return;
  for (const { name } of moments.last?.catalogs.slice(0, SEEDED_CATALOGS) ?? []) {
    if (!hasHistory || seeded.has(name)) continue;
    seeded.add(name);
    try {
      const answer = await raw<History>(
        "GET",
        address("/v1/history", undefined, { catalog: name, seconds: 600 }),
      );
      moments.seed("catalogs", name, samplesOf(answer.body));
      tick.value++;
    } catch (error) {
      if (error instanceof ApiError) hasHistory = error.code !== "not_found";
      else seeded.delete(name);
    }
  }
}

let timer: ReturnType<typeof setTimeout> | undefined;
let running: AbortController | undefined;
let etag: string | null = null;

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
    const before = figuresAt.value;
    figuresAt.value = Date.now();
    if (answer.status === 304) {
      if (before !== null) moments.repeat(figuresAt.value - before);
      tick.value++;
    } else {
      etag = answer.etag;
      if (moments.add(answer.body)) tick.value++;
      void seed();
      const mb = answer.body.machines.length / 1000;
      wait = Math.max(EVERY_MS, mb * MS_FOR_A_MB, (performance.now() - started) * 4);
    }
  } catch {
    if (abort.signal.aborted) return;
  }
  timer = setTimeout(() => void poll(), wait);
}

/** Starts to poll, for as long as the page lives. */
export function startFigures(): void {
  let last = "";
  effect(() => {
    const isOn = session.value.is === "in" && visible.value;
    const next = path.value;
    untracked(() => {
      if (next !== last) {
        // Another part of the figures: its moments are not those of before.
        last = next;
        etag = null;
        moments.clear();
        seeded.clear();
        tick.value++;
      }
      if (isOn) void poll();
      else {
        clearTimeout(timer);
        running?.abort();
      }
    });
  });
}
