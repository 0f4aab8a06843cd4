// All catalogs of the fleet.
import {
  Badge,
  Choice,
  Command,
  Filter,
  href,
  Notice,
  PageHead,
  Pending,
  queryValue,
  Table,
} from "../shared.ts";
import type { Column } from "../ui/table.tsx";
import { useCatalogs } from "./read.ts";
import { type FleetCatalog, imageOf, isOpen, rolloutText, rolloutTone, totals } from "./words.ts";

const COLUMNS: Column<FleetCatalog>[] = [
  {
    key: "name",
    title: "Catalog",
    sort: (c) => c.name,
    cell: (c) => <a href={href(["fleet-catalogs", c.name])}>{c.name}</a>,
  },
  {
    key: "version",
    title: "Version",
    sort: (c) => c.spec.image,
    cell: (c) => (
      <span class="stack">
        <span>
          {imageOf(c)}:{c.version}
        </span>
        {isOpen(c.rollout) ? <Badge tone={rolloutTone(c.rollout)}>{rolloutText(c.rollout)}</Badge> : null}
      </span>
    ),
  },
  {
    key: "ready",
    title: "Machines",
    isFigure: true,
    hint: "Ready of those that there are to be",
    sort: (c) => c.spec.count ?? 0,
    cell: (c) => {
      const { ready, failed } = totals(c.shares);
      return (
        <span class="counts">
          {failed ? <Badge tone="critical">{failed} failed</Badge> : null}
          <span>
            {ready}/{c.spec.count ?? 0}
          </span>
        </span>
      );
    },
  },
  {
    key: "claimed",
    title: "Claimed",
    isFigure: true,
    sort: (c) => totals(c.shares).claimed,
    cell: (c) => totals(c.shares).claimed,
  },
  {
    key: "hosts",
    title: "Hosts",
    isFigure: true,
    hint: "Hosts that are to have machines",
    sort: (c) => totals(c.shares).hosts,
    cell: (c) => totals(c.shares).hosts,
  },
  {
    key: "unplaced",
    title: "Unplaced",
    isFigure: true,
    hint: "Machines for which no host has space",
    sort: (c) => c.unplaced,
    cell: (c) => (c.unplaced ? <Badge tone="warning">{c.unplaced}</Badge> : 0),
  },
];

export function FleetCatalogsPage() {
  const list = useCatalogs();
  const text = (queryValue("filter") ?? "").toLowerCase();
  const show = queryValue("show");
  const found = (list.data ?? []).filter((c) => {
    const labels = Object.entries(c.spec.labels ?? {}).map(([key, value]) => `${key}=${value}`);
    if (![c.name, c.spec.image, ...labels].some((t) => t.toLowerCase().includes(text))) return false;
    if (show === "wrong") {
      const isRefused = c.shares.some((s) => s.failed || s.refused);
      return c.unplaced > 0 || isRefused || c.rollout?.state === "halted";
    }
    return show === "rollout" ? isOpen(c.rollout) : true;
  });
  return (
    <>
      <PageHead title="Fleet catalogs" about="Their machines are on many hosts" />
      {list.data ? (
        <>
          <div class="toolbar">
            <Filter label="Filter by name, image or label" />
            <Choice
              label="Show"
              name="show"
              options={[
                ["", "all"],
                ["wrong", "with something wrong"],
                ["rollout", "with a rollout"],
              ]}
            />
          </div>
          <Table
            label="Fleet catalogs"
            rows={found}
            columns={COLUMNS}
            id={(c) => c.name}
            initial="name"
            empty={list.data.length ? "No catalog matches." : "The fleet has no catalogs yet."}
          />
          {list.data.length ? null : (
            <Notice>
              <Command
                label="Create the first one"
                text="spillway fleet catalog create NAME --image IMAGE:VERSION --count COUNT"
              />
            </Notice>
          )}
        </>
      ) : (
        <Pending error={list.error} what="the catalogs of the fleet" />
      )}
    </>
  );
}
