// The fleet as the host sees it: whether the host takes part, what etcd says, who places, and all hosts.
//
// Invariant: what is wrong comes first.
import {
  Badge,
  Choice,
  Facts,
  Filter,
  href,
  Notice,
  PageHead,
  Panel,
  Pending,
  queryValue,
  Table,
} from "../shared.ts";
import { plural } from "../ui/format.ts";
import type { Column } from "../ui/table.tsx";
import { ActButton, CordonActs, HostState, hostHref, memoryText } from "./host.tsx";
import { declareDead, livingReason, makeFleet, removeHost, switchPlacer } from "./host-acts.ts";
import { useFleet, useHosts, usePlacersFleet } from "./read.ts";
import { type FleetDetails, type FleetHost, placerText, standing, totals } from "./words.ts";

const STATES = ["alive", "silent", "isolated", "lost", "absent"] as const;

function columns(own: string | undefined): Column<FleetHost>[] {
  return [
    {
      key: "name",
      title: "Host",
      sort: (h) => h.name,
      cell: (h) => <a href={href(["fleet", h.name])}>{h.name}</a>,
    },
    { key: "zone", title: "Zone", sort: (h) => h.zone, cell: (h) => h.zone },
    {
      key: "state",
      title: "State",
      sort: (h) => -STATES.indexOf(h.state) - (h.draining || h.cordoned ? 0.5 : 0),
      cell: (h) => (
        <span class="stack">
          <HostState host={h} />
          {h.reason ? <span class="long-text muted">{h.reason}</span> : null}
        </span>
      ),
    },
    {
      key: "machines",
      title: "Machines",
      hint: "Ready of those that it is to have",
      isFigure: true,
      sort: (h) => totals(h.shares).wanted,
      cell: (h) => {
        const { ready, wanted, failed } = totals(h.shares);
        return (
          <span class="counts">
            {h.state === "alive" ? null : <span class="muted">last known</span>}
            {failed ? <Badge tone="critical">{failed} failed</Badge> : null}
            <a
              href={hostHref(["machines"], h.name, own)}
              aria-label={`${ready}/${wanted} machines of ${h.name}`}
            >
              {ready}/{wanted}
            </a>
          </span>
        );
      },
    },
    {
      key: "claimed",
      title: "Claimed",
      isFigure: true,
      sort: (h) => totals(h.shares).claimed,
      cell: (h) => totals(h.shares).claimed,
    },
    {
      key: "memory",
      title: "Memory",
      isFigure: true,
      isWide: true,
      hint: "Of machines that it is to have, of what machines of the fleet may take",
      sort: (h) => (h.memory_bytes ? h.used_bytes / h.memory_bytes : null),
      cell: memoryText,
    },
    { key: "version", title: "Version", isWide: true, sort: (h) => h.version, cell: (h) => h.version ?? "-" },
    {
      key: "acts",
      title: "Actions",
      cell: (h) => (
        <span class="acts">
          {livingReason(h) === null ? (
            <>
              <ActButton act={declareDead(h)} of={h.name} />
              <ActButton act={removeHost(h)} of={h.name} />
            </>
          ) : (
            <CordonActs host={h} of={h.name} />
          )}
        </span>
      ),
    },
  ];
}

const made = new Map<string | undefined, Column<FleetHost>[]>();
/** The columns, made once for each own host, so that rows stay the same. */
function columnsFor(own: string | undefined): Column<FleetHost>[] {
  const found = made.get(own) ?? columns(own);
  made.set(own, found);
  return found;
}

export function FleetPage() {
  const { data: fleet, error } = useFleet();
  const placers = usePlacersFleet(fleet);
  if (!fleet) {
    return (
      <>
        <PageHead title="Fleet" />
        <Pending error={error} what="the fleet" />
      </>
    );
  }
  const { tone, text } = standing(fleet);
  const reason = fleet.reason ? ` ${fleet.reason}` : "";
  const brake = placers?.brake ?? fleet.brake;
  return (
    <>
      <PageHead
        title={`Fleet ${fleet.name}`}
        about={`as ${fleet.host} sees it`}
        acts={
          fleet.membership === "no-fleet" ? (
            <ActButton act={makeFleet(fleet)} />
          ) : (
            <ActButton act={switchPlacer(fleet)} text={switchPlacer(fleet).title.replace("?", "")} />
          )
        }
      />
      {fleet.membership === "member" && !reason ? null : (
        <Notice tone={reason && tone === "good" ? "warning" : tone}>
          {text}
          {reason}
        </Notice>
      )}
      {fleet.etcd.trouble ? (
        <Notice tone="critical">
          <strong>etcd:</strong> {fleet.etcd.trouble}
        </Notice>
      ) : null}
      {brake ? (
        <Notice tone="warning">
          <strong>Lost hosts are not replaced.</strong> {brake}
        </Notice>
      ) : null}
      {fleet.places || fleet.membership === "no-fleet" ? null : (
        <Notice tone="warning">
          <strong>The placer is switched off.</strong> No machine of a lost host is replaced, and no rollout
          over hosts goes on.
        </Notice>
      )}
      <Unreadable fleet={fleet} />
      <Hosts fleet={fleet} />
      <div class="below">
        <Panel title={`${fleet.host} in the fleet`}>
          <Facts
            items={[
              ["Takes part as", fleet.membership],
              ["Places machines", placerText(fleet)],
              ["Member of etcd", fleet.etcd.connected ?? "none answers"],
              ["Version of etcd", fleet.etcd.version ?? "-"],
              ["Members of etcd", fleet.etcd.members.join(", ") || "-"],
              ["Records seen up to", `revision ${fleet.etcd.revision}`],
              ["Epoch", fleet.epoch == null ? "none: it has no lease" : String(fleet.epoch)],
            ]}
          />
        </Panel>
      </div>
    </>
  );
}

function Unreadable({ fleet }: { fleet: FleetDetails }) {
  const keys = Object.entries(fleet.unreadable ?? {});
  if (keys.length === 0) return null;
  return (
    <Notice tone="warning">
      <strong>{plural(keys.length, "record")} cannot be read.</strong> What they are about stays as it is.
      <ul>
        {keys.map(([key, why]) => (
          <li key={key}>
            <code>{key}</code>: {why}
          </li>
        ))}
      </ul>
    </Notice>
  );
}

function Hosts({ fleet }: { fleet: FleetDetails }) {
  const list = useHosts();
  const text = (queryValue("filter") ?? "").toLowerCase();
  const state = queryValue("state");
  if (!list.data) {
    // Who has not read the records has none to show, and the page says why.
    return fleet.membership === "member" || !list.error ? (
      <Pending error={list.error} what="the hosts" />
    ) : null;
  }
  const hosts = list.data.filter((h) => {
    const labels = Object.entries(h.labels).map(([key, value]) => `${key}=${value}`);
    if (![h.name, h.zone, ...labels].some((t) => t.toLowerCase().includes(text))) return false;
    if (state === "held") return h.cordoned || h.draining;
    return state === undefined || h.state === state;
  });
  return (
    <>
      <div class="toolbar">
        <Filter label="Filter by name, zone or label" />
        <Choice
          label="State"
          name="state"
          options={[
            ["", "all"],
            ...STATES.map((s): [string, string] => [s, s]),
            ["held", "cordoned or draining"],
          ]}
        />
        <span class="muted count">{plural(hosts.length, "host")}</span>
      </div>
      <Table
        label="Hosts"
        rows={hosts}
        columns={columnsFor(fleet.host)}
        id={(h) => h.name}
        initial="name"
        empty={list.data.length ? "No host matches." : "No host has joined yet."}
      />
    </>
  );
}
