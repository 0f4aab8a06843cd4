// All events that the page knows, newest first, with filters.
import type { Event } from "../api/client.ts";
import { queryValue } from "../router.ts";
import { events, type Following, following } from "../state/events.ts";
import { plural } from "../ui/format.ts";
import { Choice, Command, Filter, PageHead } from "../ui/parts.tsx";
import { EventList, isShown } from "./events-list.tsx";

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
const HOW: Record<Following, string> = {
  stream: "New ones appear by themselves.",
  polling: "New ones are asked for every 5 seconds.",
  connecting: "New ones appear when the daemon answers.",
  paused: "New ones appear when the page can be seen.",
};

export function EventsPage() {
  const text = (queryValue("filter") ?? "").toLowerCase();
  const kind = queryValue("kind");
  const of = (e: Event) =>
    (!kind || e.kind === kind) &&
    (e.object.toLowerCase().includes(text) || e.text.toLowerCase().includes(text));
  const found = events.value.filter((e) => isShown(e, of)).length;
  return (
    <>
      <PageHead
        title="Events"
        about={`${plural(found, "event")}${found > SHOWN ? `, the newest ${SHOWN} are shown` : ""}. ${HOW[following.value]}`}
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
