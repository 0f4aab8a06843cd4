// How much RAM the machines of a catalog need, and what a new limit would ask of the host.
import { ask, changeAct } from "../acts.ts";
import type { Catalog, Host } from "../api/client.ts";
import { absorbed, at } from "../state/curve.ts";
import { machineRows } from "../state/figures.ts";
import { useObject } from "../state/resource.ts";
import { can } from "../state/session.ts";
import { bytes, percent } from "../ui/format.ts";
import { Empty, Panel } from "../ui/parts.tsx";
import { SizingPanel, useCatalogCurve } from "../ui/sizing.tsx";

export function CatalogSizing({ catalog }: { catalog: Catalog }) {
  const host = useObject<Host>("/v1/host");
  const with_ = machineRows.value.filter((m) => m.catalog === catalog.name && m.levels.ram_limit_bytes > 0);
  const { sizing, isLoading } = useCatalogCurve(with_.length ? catalog.name : null);
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
  if (!sizing)
    return <Empty>{isLoading ? "Reading the curves of the disks" : "No disk has a curve to show."}</Empty>;
  const running = with_.length;
  return (
    <Panel
      title="How much RAM is enough"
      aside={with_.length > sizing.machines ? `${sizing.machines} of ${with_.length} machines` : null}
    >
      <SizingPanel sizing={sizing} limit={limit} machines={running}>
        {(ram) => {
          const before = limits.reduce((sum, n) => sum + n, 0);
          const budget = host.data?.budget;
          const then = budget ? budget.ram_bytes - before + ram * running : 0;
          const isOver = budget ? then > budget.ram_limit_bytes : false;
          const share = absorbed(sizing, ram);
          return (
            <div class="apply">
              <p class={isOver ? "critical-text" : undefined}>
                {budget
                  ? `With it the host promises ${bytes(then)} of ${bytes(budget.ram_limit_bytes)} to write caches.${isOver ? " That is more than it has: the daemon will refuse it." : ""}`
                  : ""}
              </p>
              <button
                type="button"
                class="primary"
                disabled={!can("admin") || ram === limit}
                onClick={() =>
                  ask(
                    changeAct(
                      catalog,
                      { ram_bytes: ram },
                      `Give each machine of ${catalog.name} ${bytes(ram)} of RAM?`,
                      [
                        limit === null
                          ? "Running machines get the limit at once."
                          : `The limit changes from ${bytes(limit)} to ${bytes(ram)}, for running machines at once.`,
                        ...(limit !== null && ram < limit
                          ? [
                              "Blocks that no longer fit move to the overflow, and the memory is free afterwards.",
                            ]
                          : []),
                        `By the curve, RAM would have absorbed ${share === null ? "all" : percent(share)} of the written bytes, and ${bytes(at(sizing.points, ram).written)} would have gone to the overflow.`,
                        ...(budget
                          ? [
                              `The host then promises ${bytes(then)} of ${bytes(budget.ram_limit_bytes)} to write caches.`,
                            ]
                          : []),
                      ],
                    ),
                  )
                }
              >
                Apply
              </button>
            </div>
          );
        }}
      </SizingPanel>
    </Panel>
  );
}
