// A list of events, as pages of objects show it.
import type { Event } from "../api/client.ts";
import { href } from "../router.ts";
import { events } from "../state/events.ts";
import { now } from "../state/visible.ts";
import { ago, clock } from "../ui/format.ts";
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

export function EventList({
  of,
  most = 100,
  hasObject = true,
}: {
  of?: (event: Event) => boolean;
  most?: number;
  hasObject?: boolean;
}) {
  const shown = (of ? events.value.filter(of) : events.value).slice(0, most);
  if (shown.length === 0) return <Empty>No events. The daemon keeps them for a week.</Empty>;
  return (
    <ol class="events">
      {shown.map((event) => (
        <EventLine key={event.id} event={event} hasObject={hasObject} />
      ))}
    </ol>
  );
}
