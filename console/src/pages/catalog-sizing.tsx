// How much RAM the machines of a catalog need, and what a new limit would ask of the host.
import { ask, changeAct, putCatalog } from "../acts.ts";
import type { Catalog, Host } from "../api/client.ts";
import { absorbed, at, type Sizing } from "../state/curve.ts";
import { useDryRun } from "../state/dry-run.ts";
import { machineRows } from "../state/figures.ts";
import { useObject } from "../state/resource.ts";
import { can } from "../state/session.ts";
import { bytes, percent } from "../ui/format.ts";
import { Empty, Panel, Pending } from "../ui/parts.tsx";
import { SizingPanel, useCatalogCurve } from "../ui/sizing.tsx";

export function CatalogSizing({ catalog }: { catalog: Catalog }) {
  // A machine that is off and keeps its disk has almost no RAM tier meanwhile.
  const with_ = machineRows.value.filter(
    (m) => m.catalog === catalog.name && m.levels.ram_limit_bytes > 0 && m.phase !== "stopped",
  );
  const { sizing, error } = useCatalogCurve(with_.length ? catalog.name : null);
  const limits = with_.map((m) => m.levels.ram_limit_bytes);
  const limit = catalog.spec.ram_bytes ?? (limits.length ? Math.max(...limits) : null);
  if (with_.length === 0) {
    return (
      <Panel title="How much RAM is enough">
        <Empty>
          No machine with a RAM tier runs. Each disk counts while it is served; start machines to get a curve.
        </Empty>
      </Panel>
    );
  }
  if (!sizing) return <Pending error={error} what="the curves" />;
  const running = with_.length;
  return (
    <Panel
      title="How much RAM is enough"
      aside={with_.length > sizing.machines ? `${sizing.machines} of ${with_.length} machines` : null}
    >
      <SizingPanel sizing={sizing} limit={limit} machines={running}>
        {(ram) => <ApplyLimit catalog={catalog} sizing={sizing} limits={limits} limit={limit} ram={ram} />}
      </SizingPanel>
    </Panel>
  );
}

function ApplyLimit({
  catalog,
  sizing,
  limits,
  limit,
  ram,
}: {
  catalog: Catalog;
  sizing: Sizing;
  /** Limits of the machines that run. */
  limits: number[];
  limit: number | null;
  ram: number;
}) {
  const host = useObject<Host>("/v1/host");
  const isNew = ram !== limit;
  const verdict = useDryRun(
    can("admin") && isNew ? JSON.stringify([catalog.name, catalog.revision, ram]) : null,
    async () => (await putCatalog(catalog, { ram_bytes: ram }, true)).body,
  );
  const budget = host.data?.budget;
  const then = budget ? budget.ram_bytes - limits.reduce((sum, n) => sum + n, 0) + ram * limits.length : null;
  const promise =
    budget && then !== null
      ? `the limits of machines that are on are ${bytes(then)} of the host's budget of ${bytes(budget.ram_limit_bytes)}`
      : null;
  const lines = [
    limit === null
      ? "Running machines get the limit at once."
      : `The limit changes from ${bytes(limit)} to ${bytes(ram)}, for running machines at once.`,
    ...(limit !== null && ram < limit
      ? [
          catalog.spec.mode === "ram"
            ? "There is no overflow: a write cache that holds more than the limit is full, and writes that need space wait or fail."
            : "Blocks that no longer fit move to the overflow, and the memory is free afterwards.",
        ]
      : []),
    outcome(sizing, ram),
    ...(promise ? [`Then ${promise}.`] : []),
    ...(verdict && "answer" in verdict ? verdict.answer.warnings : []),
  ];
  return (
    <div class="apply">
      <div aria-live="polite">
        {promise ? <p>With it {promise}.</p> : null}
        {!can("admin") || !isNew ? null : verdict === null ? (
          <p class="muted">The daemon checks it.</p>
        ) : "error" in verdict ? (
          <p class="critical-text">The daemon refuses it: {verdict.error}</p>
        ) : (
          verdict.answer.warnings.map((w) => (
            <p key={w} class="warning-text">
              {w}
            </p>
          ))
        )}
      </div>
      <button
        type="button"
        class="primary"
        disabled={!isNew || verdict === null || "error" in verdict}
        onClick={() =>
          ask(
            changeAct(
              catalog,
              { ram_bytes: ram },
              `Give each machine of ${catalog.name} ${bytes(ram)} of RAM?`,
              lines,
            ),
          )
        }
      >
        Apply
      </button>
    </div>
  );
}

/** What the curve says of a limit. Nothing is said before anything was written. */
function outcome(sizing: Sizing, ram: number): string {
  const share = absorbed(sizing, ram);
  return share === null
    ? "The machines have written nothing that could be counted yet."
    : `By the curve, RAM would have absorbed ${percent(share)} of the written bytes, and ${bytes(at(sizing.points, ram).written)} would have gone to the overflow.`;
}
