// All catalogs, with how full their machines are and what they write.
import { useState } from "preact/hooks";
import { ask, catalogsAct, deleteCatalog, keeping, keepsData, machineAct } from "../acts.ts";
import type { Catalog, Schemas } from "../api/client.ts";
import { href, queryValue } from "../router.ts";
import { catalogRows, figures } from "../state/figures.ts";
import { type CatalogRow, notOff, total } from "../state/moments.ts";
import { useList } from "../state/resource.ts";
import { against, can, lacks } from "../state/session.ts";
import { ActButton } from "../ui/act-button.tsx";
import { percent } from "../ui/format.ts";
import { Counts, figureColumns } from "../ui/machine-cells.tsx";
import { Badge, Choice, Filter, PageHead, Pending } from "../ui/parts.tsx";
import { type Column, SelectionBar, Table } from "../ui/table.tsx";

interface Item {
  catalog: Catalog;
  row: CatalogRow | undefined;
  worst: { name: string; fill: number } | undefined;
}

function rolloutText(rollout: Schemas["Rollout"]): string {
  const p = rollout.progress;
  const state = rollout.paused ? "paused" : (p?.state ?? "running");
  const version = `version ${rollout.version}`;
  return p ? `${p.done} of ${p.of} have ${version}, ${state}` : `to ${version}, ${state}`;
}

const COLUMNS: Column<Item>[] = [
  {
    key: "name",
    title: "Catalog",
    sort: (i) => i.catalog.name,
    cell: (i) => <a href={href(["catalogs", i.catalog.name])}>{i.catalog.name}</a>,
  },
  {
    key: "machines",
    title: "Machines",
    hint: "Running of all",
    sort: (i) => (i.row ? -total(i.row.counts) : 0),
    cell: (i) => (i.row ? <Counts row={i.row} /> : "-"),
  },
  {
    key: "warm",
    title: "Warm",
    isFigure: true,
    isWide: true,
    hint: "Machines that are ready and unclaimed, of those that the catalog keeps so",
    sort: (i) => i.catalog.spec.warm ?? 0,
    cell: (i) =>
      i.catalog.spec.warm
        ? `${Math.min(i.row?.counts.available ?? 0, i.catalog.spec.warm)}/${i.catalog.spec.warm}`
        : "-",
  },
  {
    key: "version",
    title: "Version",
    sort: (i) => i.catalog.spec.image,
    cell: (i) => (
      <span class="stack">
        <span>
          {i.catalog.spec.image.split(":")[0]}:{i.catalog.version}
        </span>
        {i.catalog.rollout ? (
          <Badge tone={i.catalog.rollout.progress?.state === "stalled" ? "warning" : "note"}>
            {rolloutText(i.catalog.rollout)}
          </Badge>
        ) : null}
      </span>
    ),
  },
  {
    key: "worst",
    title: "Fullest",
    isFigure: true,
    hint: "Fill of the fullest machine",
    sort: (i) => i.worst?.fill,
    cell: (i) =>
      i.worst && i.worst.fill > 0 ? (
        <a href={href(["machines", i.worst.name])} title={i.worst.name}>
          {percent(i.worst.fill)}
        </a>
      ) : (
        "-"
      ),
  },
  ...figureColumns<Item>((i) => i.row),
];

export function CatalogsPage() {
  const list = useList<Catalog>("/v1/catalogs");
  const [chosen, setChosen] = useState<Set<string>>(new Set());
  const rows = new Map(catalogRows.value.map((r) => [r.name, r]));
  const sums = new Map(figures.value?.catalogs.map((c) => [c.name, c]));
  const text = (queryValue("filter") ?? "").toLowerCase();
  const level = queryValue("level");
  const items = (list.data ?? [])
    .map((catalog): Item => {
      const row = rows.get(catalog.name);
      const { fullest, first_full } = sums.get(catalog.name) ?? {};
      // A catalog is in trouble as soon as its first machine is.
      const secondsToFull = first_full?.seconds ?? row?.secondsToFull ?? null;
      const worst = fullest
        ? { name: fullest.name, fill: fullest.used_bytes / fullest.limit_bytes }
        : undefined;
      return { catalog, row: row && { ...row, secondsToFull }, worst };
    })
    .filter((i) => {
      const labels = Object.entries(i.catalog.spec.labels ?? {}).map(([k, v]) => `${k}=${v}`);
      if (![i.catalog.name, i.catalog.spec.image, ...labels].some((t) => t.toLowerCase().includes(text)))
        return false;
      if (level === "wrong") {
        const l = i.row?.levels;
        return Boolean(l && (l.warning || l.full || l.degraded || l.stalled || i.row?.counts.failed));
      }
      return level === "rollout" ? Boolean(i.catalog.rollout) : true;
    });
  const targets = items
    .filter((i) => chosen.has(i.catalog.name))
    .map((i) => ({
      catalog: i.catalog.name,
      size: i.row ? total(i.row.counts) : (i.catalog.spec.count ?? 0),
      claimed: i.row?.counts.claimed ?? 0,
      isKeeping: keepsData(i.catalog.spec),
      graceSeconds: i.catalog.spec.grace_seconds,
    }));
  const isKeeping = keeping(targets.map((t) => t.isKeeping));
  const act = (action: Schemas["Action"]) => {
    const [first] = targets;
    if (first) ask(targets.length === 1 ? machineAct(action, first) : catalogsAct(action, targets));
  };
  const one = chosen.size === 1 ? items.find((i) => chosen.has(i.catalog.name)) : undefined;
  return (
    <>
      <PageHead
        title="Catalogs"
        acts={
          can("admin") ? (
            <a class="button primary" href={href(["catalogs", "new"])}>
              New catalog
            </a>
          ) : null
        }
      />
      <div class="toolbar">
        <Filter label="Filter by name, image or label" />
        <Choice
          label="Show"
          name="level"
          options={[
            ["", "all"],
            ["wrong", "with something wrong"],
            ["rollout", "with a rollout"],
          ]}
        />
      </div>
      <SelectionBar chosen={chosen} clear={() => setChosen(new Set())} noun="catalog">
        {(["start", "stop", "reset"] as const).map((action) => (
          <ActButton key={action} action={action} isKeeping={isKeeping} act={act} />
        ))}
        <button
          type="button"
          {...against(lacks("admin") ?? (one ? null : "Choose one catalog."))}
          onClick={() => one && ask(deleteCatalog(one.catalog, one.row ? notOff(one.row.counts) : 0))}
        >
          Delete
        </button>
      </SelectionBar>
      {list.data ? (
        <Table
          label="Catalogs"
          rows={items}
          columns={COLUMNS}
          id={(i) => i.catalog.name}
          initial="name"
          selection={{ chosen, change: setChosen }}
          empty={
            list.data.length ? (
              "No catalog matches."
            ) : (
              <>
                A catalog is a set of machines made from one image.{" "}
                <a href={href(["catalogs", "new"])}>Make the first</a>
              </>
            )
          }
        />
      ) : (
        <Pending error={list.error} what="the catalogs" />
      )}
    </>
  );
}
