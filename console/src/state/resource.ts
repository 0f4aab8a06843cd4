// Objects of the API that pages show: read when a page needs them, again when events say that something happened, and now
// and then. Owns the copies; a page never keeps one.
//
// Invariant: an object is only asked for while a visible page shows it. What is shown stays until its successor is there,
// also while the daemon is away.
import { type Signal, signal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { ApiError, all, raw } from "../api/client.ts";
import { newEvents } from "./events.ts";
import { session } from "./session.ts";
import { visible } from "./visible.ts";

export interface Loaded<T> {
  data: T | undefined;
  /** The tag for If-Match, as it came. */
  etag: string | null;
  error: ApiError | Error | null;
  loading: boolean;
}

interface Entry {
  state: Signal<Loaded<unknown>>;
  users: number;
  everyMs: number;
  isList: boolean;
  next: number;
  inFlight: boolean;
  /** The least pause between two readings, in milliseconds: what is slow to read is read less often. */
  pauseMs: number;
}

const entries = new Map<string, Entry>();
const AFTER_EVENTS_MS = 400;
const LIST_AFTER_EVENTS_MS = 1000;
/** What is not there is looked for less often. */
const MISSING_MS = 60_000;
/** Entries that nobody shows are kept, so that going back is instant, but not without end. */
const UNUSED = 40;

function entry(path: string, isList: boolean, everyMs: number): Entry {
  let found = entries.get(path);
  if (!found) {
    for (const [old, { users }] of entries) {
      if (entries.size < UNUSED) break;
      if (users === 0) entries.delete(old);
    }
    found = {
      state: signal<Loaded<unknown>>({ data: undefined, etag: null, error: null, loading: true }),
      users: 0,
      everyMs,
      isList,
      next: 0,
      inFlight: false,
      pauseMs: 0,
    };
    entries.set(path, found);
  }
  return found;
}

async function load(path: string, of: Entry): Promise<void> {
  if (of.inFlight) return;
  of.inFlight = true;
  const before = of.state.value;
  const started = performance.now();
  try {
    if (of.isList) {
      const data = await all<unknown>(path);
      of.state.value = { data, etag: null, error: null, loading: false };
    } else {
      const headers: Record<string, string> =
        before.etag && before.data !== undefined && !isLive(path) ? { "If-None-Match": before.etag } : {};
      const answer = await raw<unknown>("GET", path, { headers });
      if (answer.status !== 304) {
        of.state.value = { data: answer.body, etag: answer.etag, error: null, loading: false };
      } else if (before.error) of.state.value = { ...before, error: null };
    }
  } catch (error) {
    const problem = error instanceof Error ? error : new Error(String(error));
    const isGone = problem instanceof ApiError && problem.code === "not_found";
    of.state.value = { ...before, data: isGone ? undefined : before.data, error: problem, loading: false };
  }
  of.inFlight = false;
  const { error } = of.state.value;
  const isMissing = error instanceof ApiError && error.code === "not_found";
  of.pauseMs = (performance.now() - started) * 5;
  of.next = Date.now() + Math.max(isMissing ? MISSING_MS : of.everyMs, of.pauseMs);
}

/** Objects whose tag covers only what clients can change, while their status goes on: they are read anew each time. */
function isLive(path: string): boolean {
  return /^\/v1\/(machines|host|catalogs)/.test(path);
}

setInterval(() => {
  if (!visible.value || session.value.is !== "in") return;
  for (const [path, of] of entries) if (of.users > 0 && Date.now() >= of.next) void load(path, of);
}, 500);

newEvents.subscribe(() => {
  for (const of of entries.values()) {
    const pause = Math.max(of.isList ? LIST_AFTER_EVENTS_MS : AFTER_EVENTS_MS, of.pauseMs);
    of.next = Math.min(of.next, Date.now() + pause);
  }
});

function use<T>(path: string | null, isList: boolean, everyMs: number): Loaded<T> {
  useEffect(() => {
    if (path === null) return;
    const of = entry(path, isList, everyMs);
    of.users++;
    if (Date.now() >= of.next) void load(path, of);
    return () => {
      of.users--;
    };
  }, [path, isList, everyMs]);
  if (path === null) return { data: undefined, etag: null, error: null, loading: false };
  return entry(path, isList, everyMs).state.value as Loaded<T>;
}

/** An object at a path. */
export function useObject<T>(path: string | null, everyMs = 5000): Loaded<T> {
  return use<T>(path, false, everyMs);
}

/** All objects of a collection. */
export function useList<T>(path: string | null, everyMs = 10_000): Loaded<T[]> {
  return use<T[]>(path, true, everyMs);
}

/** Reads everything that is shown again, because something was changed. */
export function refresh(): void {
  for (const [path, of] of entries) {
    if (of.users > 0) void load(path, of);
    else of.next = 0;
  }
}
