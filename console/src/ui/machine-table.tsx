// The table of machines, of the host or of one catalog, with its filters and its acts.
import { useEffect, useMemo, useState } from "preact/hooks";
import { ask, machineAct, machinesTarget } from "../acts.ts";
import type { Catalog, Machine, Schemas } from "../api/client.ts";
import { href, queryValue } from "../router.ts";
import { following } from "../state/events.ts";
import { machineCount, machineRow } from "../state/figures.ts";
import { type Loaded, readSoon, useList } from "../state/resource.ts";
import { ActButton } from "./act-button.tsx";
import { plural } from "./format.ts";
import { figureColumns, PhaseBadge, useDerived } from "./machine-cells.tsx";
import { Badge, Choice, Filter, Pending } from "./parts.tsx";
import { type Column, SelectionBar, Table } from "./table.tsx";

const ORDER: Schemas["Phase"][] = [
  "failed",
  "waiting",
  "placing",
  "starting",
  "stopping",
  "running",
  "stopped",
];

const phaseOf = (m: Machine) => machineRow(m.name)?.phase ?? m.status.phase;
const isReady = (m: Machine) => machineRow(m.name)?.ready ?? m.status.ready;

function State({ machine }: { machine: Machine }) {
  const source = { item: machine, of: (m: Machine) => machineRow(m.name) };
  const phase = useDerived(source, () => phaseOf(machine));
  const ready = useDerived(source, () => isReady(machine));
  const isSilent = useDerived(source, (row) => row?.unresponsive ?? false);
  return (
    <span class="counts" title={machine.status.message ?? undefined}>
      <PhaseBadge phase={phase} isReady={ready} />
      {machine.claim ? <Badge>claimed</Badge> : null}
      {machine.drained ? <Badge>drained</Badge> : null}
      {isSilent ? <Badge tone="warning">no answer</Badge> : null}
    </span>
  );
}

const NAME: Column<Machine> = {
  key: "name",
  title: "Machine",
  sort: (m) => m.name,
  cell: (m) => <a href={href(["machines", m.name])}>{m.name}</a>,
};
const CATALOG: Column<Machine> = {
  key: "catalog",
  title: "Catalog",
  sort: (m) => m.catalog,
  cell: (m) => <a href={href(["catalogs", m.catalog])}>{m.catalog}</a>,
};
const OTHERS: Column<Machine>[] = [
  {
    key: "state",
    title: "State",
    sort: (m) => ORDER.indexOf(phaseOf(m)) + (isReady(m) ? 0.5 : 0),
    cell: (m) => <State machine={m} />,
  },
  {
    key: "version",
    title: "Version",
    isWide: true,
    sort: (m) => m.status.run?.version ?? 0,
    cell: ({ status: { run } }) =>
      run ? (
        <span class="counts">
          {run.image}:{run.version}
          {run.outdated ? <Badge tone="note">outdated</Badge> : null}
        </span>
      ) : (
        "-"
      ),
  },
  ...figureColumns<Machine>((m) => machineRow(m.name)),
];
// Made once, so that a row stays the same while its machine does.
const OF_HOST = [NAME, CATALOG, ...OTHERS];
const OF_CATALOG = [NAME, ...OTHERS];

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

function matches(m: Machine, state: string | undefined): boolean {
  switch (state) {
    case undefined:
      return true;
    case "ready":
      return isReady(m);
    case "claimed":
      return m.claim !== null;
    case "full": {
      const levels = machineRow(m.name)?.levels;
      return Boolean(levels?.full || levels?.warning);
    }
    case "outdated":
      return m.status.run?.outdated ?? false;
    case "unresponsive":
      return machineRow(m.name)?.unresponsive ?? false;
    default:
      return phaseOf(m) === state;
  }
}

/**
 * How often the list of machines is read while events come: they and the figures tell of what happens to machines, but for other users'
 * drains and changes of a catalog's settings.
 */
const FOLLOWED_MS = 30_000;
const OTHERWISE_MS = 10_000;

/** The machines at a path, which the figures are also of. */
function useMachines(path: string): Loaded<Machine[]> {
  const list = useList<Machine>(path, following.value === "stream" ? FOLLOWED_MS : OTHERWISE_MS);
  const [listed, counted] = [list.data?.length, machineCount.value];
  // No event tells of machines that are made or deleted.
  useEffect(() => {
    if (listed !== undefined && counted !== null && listed !== counted) readSoon(path);
  }, [path, counted]);
  return list;
}

/** The machines of a list that are of a catalog, and have a text in what they are known by. */
function useFound(list: Machine[] | undefined, of: string | undefined, text: string): Machine[] {
  return useMemo(
    () =>
      (list ?? []).filter(
        (m) =>
          (of === undefined || m.catalog === of) &&
          [m.name, m.catalog, m.claim?.owner ?? "", m.status.address ?? ""].some((t) =>
            t.toLowerCase().includes(text),
          ),
      ),
    [list, of, text],
  );
}

export function MachineTable({ catalog }: { catalog?: Catalog }) {
  const path = catalog ? `/v1/machines?catalog=${catalog.name}` : "/v1/machines";
  const list = useMachines(path);
  const catalogs = useList<Catalog>(catalog ? null : "/v1/catalogs");
  const [chosen, setChosen] = useState<Set<string>>(new Set());
  const text = (queryValue("filter") ?? "").toLowerCase();
  const found = useFound(list.data, catalog ? undefined : queryValue("catalog"), text);
  const state = queryValue("state");
  if (!list.data) return <Pending error={list.error} what="the machines" />;
  const machines = state === undefined ? found : found.filter((m) => matches(m, state));
  const rows = machines
    .filter((m) => chosen.has(m.name))
    .map((m) => ({ name: m.name, catalog: m.catalog, claimed: m.claim !== null }));
  const names = rows.map((row) => row.name);
  const target = machinesTarget(names, rows, catalog ? [catalog] : catalogs.data);
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
        <span class="muted count">{plural(machines.length, "machine")}</span>
      </div>
      <SelectionBar chosen={chosen} clear={() => setChosen(new Set())} noun="machine">
        {(["start", "stop", "restart", "reset", "drain", "undrain"] as const).map((action) => (
          <ActButton key={action} action={action} isKeeping={target.isKeeping} act={act} />
        ))}
      </SelectionBar>
      <Table
        label="Machines"
        rows={machines}
        columns={catalog ? OF_CATALOG : OF_HOST}
        id={(m) => m.name}
        initial="name"
        selection={{ chosen, change: setChosen }}
        empty={list.data.length ? "No machine matches." : "There are no machines."}
      />
    </>
  );
}
