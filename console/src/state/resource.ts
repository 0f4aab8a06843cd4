// Objects of the API that pages show: read when a page needs them, again when events say that something happened, and now
// and then. Owns the copies; a page never keeps one.
//
// Invariant: an object is only asked for while a visible page shows it. What is shown stays until its successor is there,
// also while the daemon is away. What was asked for while an object is read is read once more: the answer may be from before.
import { type Signal, signal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { ApiError, all, raw } from "../api/client.ts";
import { newEvents } from "./events.ts";
import { isSignedIn } from "./session.ts";
import { visible } from "./visible.ts";

export interface Loaded<T> {
  data: T | undefined;
  /** When the data was asked for, in milliseconds since the epoch; null without data. */
  at: number | null;
  /** The tag for If-Match, as it came. */
  etag: string | null;
  /** Why the last reading failed; the data is of an earlier one. */
  error: Error | null;
  loading: boolean;
}

interface Entry {
  state: Signal<Loaded<unknown>>;
  users: number;
  everyMs: number;
  isList: boolean;
  /** When it is read next, in milliseconds since the epoch; Infinity while it is read and nobody asks for another reading. */
  next: number;
  inFlight: boolean;
  /** How many readings have failed since the last good one. */
  failures: number;
  /** The least pause between two readings, in milliseconds: what is slow to read is read less often. */
  pauseMs: number;
}

const entries = new Map<string, Entry>();
/** An act may lead to another page: what was deleted is not asked for any more then. */
const AFTER_ACT_MS = 100;
const AFTER_EVENTS_MS = 400;
const LIST_AFTER_EVENTS_MS = 1000;
/** The pause after a failed reading doubles, within these bounds. */
const RETRY_MS = 1000;
const MAX_RETRY_MS = 10_000;
/** What is not there is looked for less often. */
const MISSING_MS = 60_000;
/** Entries that nobody shows are kept, so that going back is instant, but not without end. */
const UNUSED = 40;
/** A reading that failed is told when what is shown is so much older than it would be otherwise. */
const TOLERATED_MS = 6000;

const NOTHING: Loaded<unknown> = { data: undefined, at: null, etag: null, error: null, loading: true };

function entry(path: string, isList: boolean, everyMs: number): Entry {
  let found = entries.get(path);
  if (!found) {
    for (const [old, { users }] of entries) {
      if (entries.size < UNUSED) break;
      if (users === 0) entries.delete(old);
    }
    found = {
      state: signal(NOTHING),
      users: 0,
      everyMs,
      isList,
      next: 0,
      inFlight: false,
      failures: 0,
      pauseMs: 0,
    };
    entries.set(path, found);
  }
  return found;
}

async function read(path: string, isList: boolean): Promise<{ data: unknown; etag: string | null }> {
  if (isList) return { data: await all<unknown>(path), etag: null };
  const { body, etag } = await raw<unknown>("GET", path);
  return { data: body, etag };
}

function isMissing(error: Error): boolean {
  return error instanceof ApiError && error.code === "not_found";
}

/** The pause after a reading. */
function pauseAfter(of: Entry): number {
  const { error } = of.state.value;
  if (!error) return of.everyMs;
  return isMissing(error) ? MISSING_MS : Math.min(MAX_RETRY_MS, RETRY_MS * 2 ** (of.failures - 1));
}

async function load(path: string, of: Entry): Promise<void> {
  if (of.inFlight) return;
  of.inFlight = true;
  of.next = Number.POSITIVE_INFINITY;
  const at = Date.now();
  try {
    of.state.value = { ...(await read(path, of.isList)), at, error: null, loading: false };
    of.failures = 0;
  } catch (failure) {
    const error = failure instanceof Error ? failure : new Error(String(failure));
    const was = isMissing(error) ? NOTHING : of.state.value;
    of.state.value = { ...was, error, loading: false };
    of.failures++;
  }
  of.inFlight = false;
  of.pauseMs = (Date.now() - at) * 5;
  of.next = Math.min(of.next, Date.now() + Math.max(pauseAfter(of), of.pauseMs));
  loadIfDue(path, of);
}

function loadIfDue(path: string, of: Entry): void {
  if (visible.value && isSignedIn.value && of.users > 0 && Date.now() >= of.next) void load(path, of);
}

function loadWhatIsDue(): void {
  for (const [path, of] of entries) loadIfDue(path, of);
}

setInterval(loadWhatIsDue, 500);
visible.subscribe(loadWhatIsDue);
isSignedIn.subscribe((isIn) => {
  if (isIn) refresh();
});

newEvents.subscribe(() => {
  for (const of of entries.values()) {
    const pause = Math.max(of.isList ? LIST_AFTER_EVENTS_MS : AFTER_EVENTS_MS, of.pauseMs);
    of.next = Math.min(of.next, Date.now() + pause);
  }
});

/** Reads what is at a path, again and again, until the function that it returns is called. Who comes last says how often. */
export function watch(path: string, isList: boolean, everyMs: number): () => void {
  const of = entry(path, isList, everyMs);
  of.users++;
  if (everyMs < of.everyMs && !of.inFlight)
    of.next = Math.min(of.next, Date.now() + Math.max(everyMs, of.pauseMs));
  of.everyMs = everyMs;
  loadIfDue(path, of);
  return () => {
    of.users--;
  };
}

/** The copy of what is at a path. */
export function copyOf(path: string, isList: boolean, everyMs: number): Signal<Loaded<unknown>> {
  return entry(path, isList, everyMs).state;
}

function use<T>(path: string | null, isList: boolean, everyMs: number): Loaded<T> {
  useEffect(() => (path === null ? undefined : watch(path, isList, everyMs)), [path, isList, everyMs]);
  if (path === null) return { ...NOTHING, loading: false } as Loaded<T>;
  return copyOf(path, isList, everyMs).value as Loaded<T>;
}

/** An object at a path. */
export function useObject<T>(path: string | null, everyMs = 5000): Loaded<T> {
  return use<T>(path, false, everyMs);
}

/** All objects of a collection. */
export function useList<T>(path: string | null, everyMs = 10_000): Loaded<T[]> {
  return use<T[]>(path, true, everyMs);
}

/** Reads what is at a path again soon, if it is shown: it is known to have changed. */
export function readSoon(path: string): void {
  const of = entries.get(path);
  if (of) of.next = Math.min(of.next, Date.now() + Math.max(AFTER_EVENTS_MS, of.pauseMs));
}

/** Reads everything that is shown again, because something was changed. */
export function refresh(): void {
  for (const of of entries.values()) of.next = Math.min(of.next, Date.now() + AFTER_ACT_MS);
  setTimeout(loadWhatIsDue, AFTER_ACT_MS);
}

export interface Old {
  /** Parts of the path: `["machines"]`, `["catalogs", "desk"]`. */
  parts: string[];
  /** When it was read, in milliseconds since the epoch. */
  at: number;
  error: Error;
}

/** What is shown although it is old, because it could not be read again. */
export function oldParts(now: number): Old[] {
  const old: Old[] = [];
  for (const [path, of] of entries) {
    const { at, error } = of.state.value;
    if (of.users === 0 || at === null || !error) continue;
    if (now - at < of.everyMs + TOLERATED_MS) continue;
    const parts = (path.split("?")[0] ?? "").split("/").slice(2).map(decodeURIComponent);
    old.push({ parts, at, error });
  }
  return old;
}
