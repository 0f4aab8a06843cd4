// The events of the host, newest first, as they happen: by a stream while the page can be seen; while there is none, by asking.
//
// Invariant: events are in the order of their ids, and none is there twice. At most one source is open. After a break it goes on
// behind the last event that came, also over a restart of the daemon; what the daemon has lost meanwhile is an event itself.
import { computed, effect, signal, untracked } from "@preact/signals";
import { address, type Event, raw } from "../api/client.ts";
import { through } from "../shown-host.ts";
import { transport } from "../transport.ts";
import { awaySince, isSignedIn } from "./session.ts";
import { visible } from "./visible.ts";

/** Events that the page keeps, unless older ones were asked for. The daemon keeps a week of them. */
const KEPT = 5000;
/** Events of before the page that are read at a time. */
const OLDER = 1000;
/** How often events are asked for while there is no stream. */
const POLL_MS = 5000;
/** How long after a stream that did not last so long another one is tried. */
const RETRY_MS = 15_000;
/** Events that come within this time are shown together: the first answer may be thousands. */
const BATCH_MS = 100;
/** Events that come so soon after the first connection are of the past. */
const PAST_MS = 1000;

export const events = signal<Event[]>([]);
/** "stream": events come as they happen. */
export type Following = "stream" | "polling" | "connecting" | "paused";
export const following = signal<Following>("paused");
/** Grows with each batch of new events that came after the first. */
export const newEvents = signal(0);
/** Whether the daemon has told what there was before the page was opened. */
export const hasBegun = signal(false);
/** The event before which the daemon had none. */
const oldestId = signal<string | null>(null);
/** Whether the daemon has no events before the oldest one here. */
export const hasOldest = computed(() => {
  const id = events.value.at(-1)?.id;
  return hasBegun.value && (id === undefined || id === oldestId.value || parts(id).number <= 1);
});

/** An id `HISTORY-NUMBER`. */
function parts(id: string): { history: string; number: number } {
  const [history = "", number = ""] = id.split("-");
  return { history, number: Number(number) };
}

/** Adds events that came in the order of their ids, and drops those that are there already. */
export function merge(kept: Event[], came: Event[], most = KEPT): Event[] {
  const newest = new Map<string, number>();
  // The newest of a history is the first of it here: whatever is not behind it has come before.
  for (const { id } of kept) {
    const { history, number } = parts(id);
    if (!newest.has(history)) newest.set(history, number);
  }
  const fresh = came.filter(({ id }) => {
    const { history, number } = parts(id);
    if (number <= (newest.get(history) ?? -1)) return false;
    newest.set(history, number);
    return true;
  });
  return fresh.length ? [...fresh.reverse(), ...kept].slice(0, most) : kept;
}

let most = KEPT;
let batch: Event[] = [];
let isTaking = false;
/** Ends the source of events that is open. */
let close: (() => void) | undefined;

const last = () => batch.at(-1)?.id ?? events.value[0]?.id;

function take(): void {
  isTaking = false;
  const next = merge(events.value, batch, most);
  batch = [];
  if (next === events.value) return;
  events.value = next;
  if (hasBegun.value) newEvents.value++;
  hasBegun.value = true;
}

function came(event: Event): void {
  batch.push(event);
  if (!isTaking) setTimeout(take, BATCH_MS);
  isTaking = true;
}

function openStream(): void {
  close?.();
  following.value = "connecting";
  let openedAt = Number.POSITIVE_INFINITY;
  const stream = transport.stream(through(address("/v1/event-stream", undefined, { after: last() })), {
    opened: () => {
      openedAt = Date.now();
      following.value = "stream";
      setTimeout(() => {
        hasBegun.value = true;
      }, PAST_MS);
    },
    message: (data) => {
      try {
        came(JSON.parse(data) as Event);
      } catch {
        // A line that is no JSON is of a newer daemon.
      }
    },
    interrupted: () => {
      following.value = "connecting";
    },
    failed: () => {
      close?.();
      const isSteady = Date.now() - openedAt >= RETRY_MS;
      const until = isSteady ? 0 : Date.now() + RETRY_MS;
      following.value = "polling";
      poll(() => {
        if (Date.now() < until) return true;
        openStream();
        return false;
      });
    },
  });
  close = () => stream.close();
}

/** Asks for events again and again, until `goesOn` has opened another source. */
function poll(goesOn: () => boolean): void {
  const abort = new AbortController();
  let timer: ReturnType<typeof setTimeout> | undefined;
  close = () => {
    abort.abort();
    clearTimeout(timer);
  };
  const ask = async () => {
    const path = address("/v1/events", undefined, { after: last() });
    try {
      const { body } = await raw<{ items: Event[] }>("GET", path, { signal: abort.signal });
      if (abort.signal.aborted) return;
      body.items.forEach(came);
      if (body.items.length === 0) hasBegun.value = true;
    } catch {
      // The next attempt follows.
    }
    if (abort.signal.aborted) return;
    if (goesOn()) timer = setTimeout(() => void ask(), POLL_MS);
  };
  void ask();
}

/** Reads the events before the oldest one here. */
export async function readOlder(): Promise<void> {
  const oldest = events.value.at(-1);
  if (!oldest) return;
  const path = address("/v1/events", undefined, { before: oldest.id, limit: OLDER });
  const { body } = await raw<{ items: Event[] }>("GET", path);
  // Another answer may have come first.
  if (events.value.at(-1) !== oldest) return;
  most += body.items.length;
  events.value = [...events.value, ...body.items.reverse()];
  if (body.items.length < OLDER) oldestId.value = events.value.at(-1)?.id ?? null;
}

/** Starts to follow, for as long as the page lives. */
export function startEvents(): void {
  effect(() => {
    const isOn = isSignedIn.value && visible.value;
    // A stream may hang when the daemon has gone: when it answers again, another one is opened.
    const isAway = awaySince.value !== null;
    untracked(() => {
      if (isOn && !isAway) return openStream();
      close?.();
      close = undefined;
      following.value = isOn ? "connecting" : "paused";
    });
  });
}
