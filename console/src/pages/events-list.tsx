// A list of events, as pages of objects show it.
import { useState } from "preact/hooks";
import { type Event, words } from "../api/client.ts";
import { href } from "../router.ts";
import { events, hasBegun, hasOldest, readOlder } from "../state/events.ts";
import { now } from "../state/visible.ts";
import { toast } from "../ui/announce.tsx";
import { ago, clock, plural } from "../ui/format.ts";
import { Badge, Empty, type Tone } from "../ui/parts.tsx";

const TONE: Partial<Record<Event["kind"], Tone>> = {
  crashed: "critical",
  failed: "critical",
  lost: "critical",
  disk: "warning",
  space: "warning",
  memory: "warning",
  waiting: "warning",
  ready: "good",
};

/** The page of an object that an event names. */
export function objectHref(object: string): string | null {
  const [kind, name] = object.split("/");
  if (kind === "machine" && name) return href(["machines", name]);
  if (kind === "catalog" && name) return href(["catalogs", name]);
  if (kind === "image" && name) return href(["images", name.split(":")[0] ?? name]);
  if (kind === "store" || kind === "registry") return href(["stores"]);
  return kind === "host" ? href([]) : null;
}

export function EventLine({ event, hasObject = true }: { event: Event; hasObject?: boolean }) {
  const to = objectHref(event.object);
  return (
    <li>
      <time dateTime={event.time} title={clock(event.time)}>
        {ago(event.time, now.value)}
      </time>
      <Badge tone={TONE[event.kind] ?? "plain"}>{event.kind}</Badge>
      {hasObject ? (
        <span class="object">
          {to ? <a href={to}>{event.object.split("/")[1] ?? event.object}</a> : event.object}
        </span>
      ) : null}
      <span class="text">{event.text}</span>
    </li>
  );
}

/** How far back the events reach that were looked through, and a way to look further. */
function Further() {
  const [busy, setBusy] = useState(false);
  const oldest = events.value.at(-1);
  if (!oldest) return null;
  const look = async () => {
    setBusy(true);
    await readOlder().catch((error) => toast(`Older events cannot be read. ${words(error)}`, "error"));
    setBusy(false);
  };
  return (
    <p class="hint">
      Looked through: the last {plural(events.value.length, "event")} of the host, since {clock(oldest.time)}.{" "}
      <button type="button" class="plain" disabled={busy} onClick={() => void look()}>
        {busy ? "Reading" : "Look further back"}
      </button>
    </p>
  );
}

/** Whether a list shows an event. That events were lost concerns every list. */
export function isShown(event: Event, of: ((event: Event) => boolean) | undefined): boolean {
  return event.kind === "lost" || !of || of(event);
}

export function EventList({
  of,
  most = 100,
  hasObject = true,
}: {
  of?: (event: Event) => boolean;
  most?: number;
  hasObject?: boolean;
}) {
  const shown = events.value.filter((event) => isShown(event, of)).slice(0, most);
  if (!hasBegun.value) return <div class="empty loading">Loading the events</div>;
  return (
    <>
      {shown.length ? (
        <ol class="events">
          {shown.map((event) => (
            <EventLine key={event.id} event={event} hasObject={hasObject} />
          ))}
        </ol>
      ) : (
        <Empty>{hasOldest.value ? "There are no events. They are kept for a week." : "None is found."}</Empty>
      )}
      {shown.length < most && !hasOldest.value ? <Further /> : null}
    </>
  );
}
