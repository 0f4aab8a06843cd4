// All events that the page knows, newest first, with filters.
import type { Event } from "../api/client.ts";
import { queryValue } from "../router.ts";
import { events, following } from "../state/events.ts";
import { count } from "../ui/format.ts";
import { Choice, Command, Filter, PageHead } from "../ui/parts.tsx";
import { EventList } from "./events-list.tsx";

const KINDS: Event["kind"][] = [
  "started",
  "ready",
  "stopped",
  "reset",
  "crashed",
  "failed",
  "claimed",
  "released",
  "disk",
  "rolled-out",
  "rollout",
  "space",
  "memory",
  "waiting",
  "lost",
];
const SHOWN = 500;

export function EventsPage() {
  const text = (queryValue("filter") ?? "").toLowerCase();
  const kind = queryValue("kind");
  const of = (e: Event) =>
    (!kind || e.kind === kind || e.kind === "lost") &&
    (e.object.toLowerCase().includes(text) || e.text.toLowerCase().includes(text));
  const all = events.value.filter(of);
  return (
    <>
      <PageHead
        title="Events"
        about={`${count(all.length)} events${all.length > SHOWN ? `, the newest ${SHOWN} are shown` : ""}. ${
          following.value === "stream"
            ? "New ones appear by themselves."
            : "New ones are asked for every 5 seconds."
        }`}
      />
      <div class="toolbar">
        <Filter label="Filter by object or text" />
        <Choice
          label="Kind"
          name="kind"
          options={[["", "all"], ...KINDS.map((k): [string, string] => [k, k])]}
        />
      </div>
      <EventList of={of} most={SHOWN} />
      <Command text={`spillway event --follow${kind ? ` --kind ${kind}` : ""}`} />
    </>
  );
}
