// The table of machines, of the host or of one catalog, with its filters and its acts.
import { useState } from "preact/hooks";
import { ask, machineAct, machinesTarget } from "../acts.ts";
import type { Catalog, Machine, Schemas } from "../api/client.ts";
import { href, queryValue } from "../router.ts";
import { machineRows } from "../state/figures.ts";
import type { MachineRow } from "../state/moments.ts";
import { useList } from "../state/resource.ts";
import { ActButton } from "./act-button.tsx";
import { plural } from "./format.ts";
import { figureColumns, PhaseBadge } from "./machine-cells.tsx";
import { Badge, Choice, Filter, Pending } from "./parts.tsx";
import { type Column, SelectionBar, Table } from "./table.tsx";

interface Item {
  name: string;
  catalog: string;
  claimed: boolean;
  phase: Schemas["Phase"];
  ready: boolean;
  machine: Machine;
  row: MachineRow | undefined;
}

const ORDER: Schemas["Phase"][] = [
  "failed",
  "waiting",
  "placing",
  "starting",
  "stopping",
  "running",
  "stopped",
];

function columns(hasCatalog: boolean): Column<Item>[] {
  return [
    {
      key: "name",
      title: "Machine",
      sort: (i) => i.name,
      cell: (i) => <a href={href(["machines", i.name])}>{i.name}</a>,
    },
    ...(hasCatalog
      ? [
          {
            key: "catalog",
            title: "Catalog",
            sort: (i: Item) => i.catalog,
            cell: (i: Item) => <a href={href(["catalogs", i.catalog])}>{i.catalog}</a>,
          },
        ]
      : []),
    {
      key: "state",
      title: "State",
      sort: (i) => ORDER.indexOf(i.phase) + (i.ready ? 0.5 : 0),
      cell: (i) => (
        <span class="counts" title={i.machine.status.message ?? undefined}>
          <PhaseBadge phase={i.phase} isReady={i.ready} />
          {i.claimed ? <Badge>claimed</Badge> : null}
          {i.machine.drained ? <Badge>drained</Badge> : null}
          {i.row?.unresponsive ? <Badge tone="warning">no answer</Badge> : null}
        </span>
      ),
    },
    {
      key: "version",
      title: "Version",
      isWide: true,
      sort: (i) => i.machine.status.run?.version ?? 0,
      cell: (i) => {
        const run = i.machine.status.run;
        return run ? (
          <span class="counts">
            {run.image}:{run.version}
            {run.outdated ? <Badge tone="note">outdated</Badge> : null}
          </span>
        ) : (
          "-"
        );
      },
    },
    ...figureColumns<Item>((i) => i.row),
  ];
}

const STATES: [string, string][] = [
  ["", "all"],
  ["ready", "ready"],
  ["claimed", "claimed"],
  ["running", "running"],
  ["stopped", "stopped"],
  ["waiting", "waiting"],
  ["failed", "failed"],
  ["full", "full, critical or warning"],
  ["outdated", "outdated"],
  ["unresponsive", "without an answer"],
];

function matches(i: Item, state: string | undefined): boolean {
  switch (state) {
    case undefined:
      return true;
    case "ready":
      return i.ready;
    case "claimed":
      return i.claimed;
    case "full":
      return Boolean(i.row && (i.row.levels.full || i.row.levels.warning));
    case "outdated":
      return i.machine.status.run?.outdated ?? false;
    case "unresponsive":
      return i.row?.unresponsive ?? false;
    default:
      return i.phase === state;
  }
}

export function MachineTable({ catalog }: { catalog?: Catalog }) {
  const path = catalog ? `/v1/machines?catalog=${catalog.name}` : "/v1/machines";
  const list = useList<Machine>(path);
  const catalogs = useList<Catalog>(catalog ? null : "/v1/catalogs");
  const [chosen, setChosen] = useState<Set<string>>(new Set());
  const rows = new Map(machineRows.value.map((r) => [r.name, r]));
  const text = (queryValue("filter") ?? "").toLowerCase();
  const state = queryValue("state");
  const of = queryValue("catalog");
  if (!list.data) return <Pending error={list.error} what="the machines" />;
  const items = list.data
    .map((machine): Item => {
      const row = rows.get(machine.name);
      return {
        name: machine.name,
        catalog: machine.catalog,
        claimed: machine.claim !== null,
        phase: row?.phase ?? machine.status.phase,
        ready: row?.ready ?? machine.status.ready,
        machine,
        row,
      };
    })
    .filter(
      (i) =>
        (catalog || !of || i.catalog === of) &&
        matches(i, state) &&
        [i.name, i.catalog, i.machine.claim?.owner ?? "", i.machine.status.address ?? ""].some((t) =>
          t.toLowerCase().includes(text),
        ),
    );
  const names = items.map((i) => i.name).filter((name) => chosen.has(name));
  const target = machinesTarget(names, items, catalog ? [catalog] : catalogs.data);
  const act = (action: Schemas["Action"]) => ask(machineAct(action, target));
  return (
    <>
      <div class="toolbar">
        <Filter label="Filter by name, owner or address" />
        <Choice label="State" name="state" options={STATES} />
        {catalog ? null : (
          <Choice
            label="Catalog"
            name="catalog"
            options={[["", "all"], ...(catalogs.data ?? []).map((c): [string, string] => [c.name, c.name])]}
          />
        )}
        <span class="muted count">{plural(items.length, "machine")}</span>
      </div>
      <SelectionBar chosen={chosen} clear={() => setChosen(new Set())} noun="machine">
        {(["start", "stop", "restart", "reset", "drain", "undrain"] as const).map((action) => (
          <ActButton key={action} action={action} isKeeping={target.isKeeping} act={act} />
        ))}
      </SelectionBar>
      <Table
        label="Machines"
        rows={items}
        columns={columns(!catalog)}
        id={(i) => i.name}
        initial="name"
        selection={{ chosen, change: setChosen }}
        empty={list.data.length ? "No machine matches." : "There are no machines."}
      />
    </>
  );
}
