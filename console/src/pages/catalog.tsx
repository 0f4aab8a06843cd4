// One catalog, in tabs.

import { ask, claimMachine, deleteCatalog, keepsData, machineAct, unclaimable } from "../acts.ts";
import type { Schemas } from "../api/client.ts";
import { ApiError, type Catalog } from "../api/client.ts";
import { href, queryValue } from "../router.ts";
import { catalogRows, figures, machineRows } from "../state/figures.ts";
import { notOff, total } from "../state/moments.ts";
import { useObject } from "../state/resource.ts";
import { against, can, lacks } from "../state/session.ts";
import { ActButton } from "../ui/act-button.tsx";
import { bytes, percent, timeToFull } from "../ui/format.ts";
import { HistoryCharts } from "../ui/history.tsx";
import { Counts, LevelBadge } from "../ui/machine-cells.tsx";
import { MachineTable } from "../ui/machine-table.tsx";
import { Badge, Notice, PageHead, Panel, Pending, Tabs } from "../ui/parts.tsx";
import { CatalogSettings } from "./catalog-settings.tsx";
import { CatalogSizing } from "./catalog-sizing.tsx";
import { CatalogVersions } from "./catalog-versions.tsx";
import { EventList } from "./events-list.tsx";

export function CatalogPage({ name }: { name: string }) {
  const loaded = useObject<Catalog>(`/v1/catalogs/${encodeURIComponent(name)}`);
  const row = catalogRows.value.find((r) => r.name === name);
  const sums = figures.value?.catalogs.find((c) => c.name === name);
  // As the list of catalogs has it: a catalog is in trouble as soon as its first machine is.
  const firstFull = sums?.first_full?.seconds;
  const catalog = loaded.data;
  if (!catalog) {
    return (
      <>
        <PageHead title={name} crumbs={[{ text: "Catalogs", to: ["catalogs"] }]} />
        {loaded.error instanceof ApiError && loaded.error.code === "not_found" ? (
          <Notice>There is no catalog {name}.</Notice>
        ) : (
          <Pending error={loaded.error} what="the catalog" />
        )}
      </>
    );
  }
  const act = (action: Schemas["Action"]) =>
    ask(
      machineAct(action, {
        catalog: name,
        size: row ? total(row.counts) : (catalog.spec.count ?? 0),
        claimed: row?.counts.claimed ?? 0,
        isKeeping: keepsData(catalog.spec),
        graceSeconds: catalog.spec.grace_seconds,
      }),
    );
  const tab = queryValue("tab") ?? "machines";
  const machines = new Set(
    machineRows.value.filter((m) => m.catalog === name).map((m) => `machine/${m.name}`),
  );
  return (
    <>
      <PageHead
        title={name}
        crumbs={[{ text: "Catalogs", to: ["catalogs"] }]}
        about={
          <span class="counts">
            <span>
              {catalog.spec.image.split(":")[0]}:{catalog.version}
            </span>
            <span class="muted">{catalog.spec.type ?? "pooled"}</span>
            {row ? <Counts row={row} /> : null}
            {row ? (
              <span>
                {percent(row.fill)} full
                {firstFull == null
                  ? ""
                  : firstFull > 0
                    ? `, the first machine full in ${timeToFull(firstFull)}`
                    : ", the first machine is full"}
              </span>
            ) : null}
            {row ? <LevelBadge row={row} /> : null}
            {row ? <span class="muted">{bytes(row.sparedBytes)} spared</span> : null}
            {catalog.rollout ? <Badge tone="note">rollout</Badge> : null}
          </span>
        }
        acts={
          <>
            <button
              type="button"
              {...against(lacks("operate") ?? unclaimable(catalog.spec))}
              onClick={() => ask(claimMachine(catalog))}
            >
              Claim one
            </button>
            {(["start", "stop", "restart", "reset"] as const).map((action) => (
              <ActButton
                key={action}
                action={action}
                isKeeping={keepsData(catalog.spec)}
                suffix=" all"
                act={act}
              />
            ))}
            {can("admin") ? (
              <button
                type="button"
                class="danger-plain"
                onClick={() => ask(deleteCatalog(catalog, row ? notOff(row.counts) : 0))}
              >
                Delete
              </button>
            ) : null}
          </>
        }
      />
      {catalog.fleet ? (
        <Notice>
          It is changed <a href={href(["fleet-catalogs", name])}>in the fleet</a>.
        </Notice>
      ) : null}
      {catalog.warnings.map((w) => (
        <Notice key={w} tone="warning">
          {w}
        </Notice>
      ))}
      <Tabs
        label={`Parts of ${name}`}
        tabs={[
          { key: "machines", title: "Machines", note: row ? String(total(row.counts)) : undefined },
          { key: "figures", title: "Figures" },
          { key: "sizing", title: "Sizing" },
          { key: "versions", title: "Versions", note: catalog.rollout ? "rollout" : undefined },
          { key: "settings", title: "Settings" },
          { key: "events", title: "Events" },
        ]}
      />
      {tab === "machines" ? <MachineTable catalog={catalog} /> : null}
      {tab === "figures" ? <HistoryCharts of={{ catalog: name }} samples={row?.samples ?? []} /> : null}
      {tab === "sizing" ? <CatalogSizing catalog={catalog} /> : null}
      {tab === "versions" ? <CatalogVersions catalog={catalog} /> : null}
      {tab === "settings" ? <CatalogSettings catalog={catalog} /> : null}
      {tab === "events" ? (
        <Panel title="Events of the catalog and its machines">
          <EventList of={(e) => e.object === `catalog/${name}` || machines.has(e.object)} most={500} />
        </Panel>
      ) : null}
    </>
  );
}
