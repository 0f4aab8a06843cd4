// The events of the host, newest first, as they happen. A stream while the page can be seen; if there can be none, polling.
//
// Invariant: events are in the order of their ids, and none is there twice. After a break the stream goes on behind the last
// event that was seen, also over a restart of the daemon.
import { effect, signal, untracked } from "@preact/signals";
import { address, type Event, raw } from "../api/client.ts";
import { type Stream, transport } from "../transport.ts";
import { session } from "./session.ts";
import { visible } from "./visible.ts";

/** Events that the page keeps. The daemon keeps a week of them. */
const KEPT = 5000;
const POLL_MS = 5000;
/** How long after a failed stream another one is tried. */
const RETRY_MS = 15_000;

export const events = signal<Event[]>([]);
export type Following = "stream" | "polling" | "connecting" | "paused";
export const following = signal<Following>("paused");
/** Grows with each batch of new events that came after the first. */
export const newEvents = signal(0);

/** Adds events that came in the order of their age, and drops those that are there already. */
export function merge(kept: Event[], came: Event[], most = KEPT): Event[] {
  if (came.length === 0) return kept;
  const known = new Set(kept.slice(0, came.length + 64).map((e) => e.id));
  const fresh = came.filter((e) => !known.has(e.id));
  return fresh.length ? [...fresh.reverse(), ...kept].slice(0, most) : kept;
}

let stream: Stream | undefined;
let timer: ReturnType<typeof setTimeout> | undefined;
let batch: Event[] = [];
let isTaking = false;
let hadFirst = false;

const last = () => batch.at(-1)?.id ?? events.value[0]?.id;

function take(): void {
  isTaking = false;
  const next = merge(events.value, batch);
  batch = [];
  if (next === events.value) return;
  events.value = next;
  if (hadFirst) newEvents.value++;
  hadFirst = true;
}

function came(event: Event): void {
  batch.push(event);
  // The first answer may be thousands of events: one rendering for all of them.
  if (!isTaking) setTimeout(take, 100);
  isTaking = true;
}

function open(): void {
  close();
  following.value = "connecting";
  stream = transport.stream(address("/v1/event-stream", undefined, { after: last() }), {
    opened: () => {
      following.value = "stream";
      setTimeout(() => {
        hadFirst = true;
      }, 1000);
    },
    message: (data) => {
      try {
        came(JSON.parse(data) as Event);
      } catch {
        // A line that is no JSON is of a newer daemon.
      }
    },
    failed: () => {
      close();
      void poll(Date.now() + RETRY_MS);
    },
  });
}

/** Asks for events until another stream is tried. */
async function poll(until: number): Promise<void> {
  following.value = "polling";
  try {
    const answer = await raw<{ items: Event[] }>("GET", address("/v1/events", undefined, { after: last() }));
    answer.body.items.forEach(came);
  } catch {
    // The next attempt follows.
  }
  if (!visible.value || session.value.is !== "in") return;
  timer = setTimeout(() => (Date.now() >= until ? open() : void poll(until)), POLL_MS);
}

function close(): void {
  stream?.close();
  stream = undefined;
  clearTimeout(timer);
}

/** Starts to follow, for as long as the page lives. */
export function startEvents(): void {
  effect(() => {
    const isOn = session.value.is === "in" && visible.value;
    untracked(() => {
      if (isOn) return open();
      close();
      following.value = "paused";
    });
  });
}
