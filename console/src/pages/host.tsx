// The host: what is wrong first, then its memory, its stores, its machines, and what happened last.
//
// Invariant: what is not wrong takes no space.
import { ask } from "../acts.ts";
import { api, type Catalog, type Figures, type Host, type Store, words } from "../api/client.ts";
import { href } from "../router.ts";
import { catalogRows, figures, figuresError } from "../state/figures.ts";
import { type History, samplesOf } from "../state/history.ts";
import { type CatalogRow, notOff, sumRates, total } from "../state/moments.ts";
import { useList, useObject } from "../state/resource.ts";
import { can } from "../state/session.ts";
import { bytes, count, duration, percent, plural, rate } from "../ui/format.ts";
import { Badge, Facts, PageHead, Panel, Pending } from "../ui/parts.tsx";
import { Spark, StackedBar } from "../ui/planes.tsx";
import { EventList } from "./events-list.tsx";
import { SOON_SECONDS, silent, Troubles, troubles } from "./host-troubles.tsx";

export function HostPage() {
  const host = useObject<Host>("/v1/host");
  const stores = useList<Store>("/v1/stores");
  const catalogs = useList<Catalog>("/v1/catalogs");
  const rows = catalogRows.value;
  const answered = figures.value?.stores;
  const found = troubles(host.data, stores.data, rows, catalogs.data, answered);
  const lacks = (what: string, { data, error }: { data: unknown; error: Error | null }) =>
    data === undefined ? [error ? `${what} (${words(error)})` : what] : [];
  const unknown = [
    ...lacks("the figures", { data: figures.value, error: figuresError.value }),
    ...lacks("the host", host),
    ...lacks("the stores", stores),
    ...lacks("the catalogs", catalogs),
  ];
  return (
    <>
      <PageHead
        title="Host"
        about={host.data ? <HostLine host={host.data} figures={figures.value} /> : null}
        acts={
          host.data && !host.data.closed && can("admin") ? (
            <CloseButton host={host.data} etag={host.etag} rows={rows} />
          ) : null
        }
      />
      {host.data?.closed ? (
        <div class="notice warning">
          <strong>The host is closed.</strong> No machine is started or claimed until it is opened.{" "}
          {can("admin") ? <CloseButton host={host.data} etag={host.etag} rows={rows} /> : null}
        </div>
      ) : null}
      {unknown.length ? (
        <p class="empty loading">Not all is known yet: waiting for {unknown.join(", ")}.</p>
      ) : null}
      <Troubles found={found} />
      <div class="grid">
        <div class="column main">
          {host.data ? (
            <Budget host={host.data} rows={rows} />
          ) : (
            <Pending error={host.error} what="the host" />
          )}
          {figures.value ? <Machines rows={rows} /> : null}
          <Panel title="Last events" aside={<a href={href(["events"])}>All events</a>}>
            <EventList most={12} />
          </Panel>
        </div>
        <div class="column">
          {figures.value ? <Spared rows={rows} since={figures.value.since} /> : null}
          <Stores stores={stores.data} silent={silent(stores.data, answered)} error={stores.error} />
        </div>
      </div>
    </>
  );
}

function HostLine({ host, figures }: { host: Host; figures: Figures | undefined }) {
  return (
    <>
      spillwayd {host.version}, hypervisor {host.hypervisor}, {plural(host.budget.host_cpus, "processor")},{" "}
      {bytes(host.budget.host_memory_bytes)} of memory
      {figures ? `, up for ${duration((Date.parse(figures.time) - Date.parse(figures.since)) / 1000)}` : ""}
    </>
  );
}

function CloseButton({ host, etag, rows }: { host: Host; etag: string | null; rows: CatalogRow[] }) {
  const action = host.closed ? "open" : "close";
  const sum = (of: (row: CatalogRow) => number) => rows.reduce((n, row) => n + of(row), 0);
  const on = sum((r) => notOff(r.counts));
  const claimed = sum((r) => r.counts.claimed);
  const isKnown = figures.value !== undefined;
  return (
    <button
      type="button"
      onClick={() =>
        ask({
          title: host.closed ? "Open the host?" : "Close the host?",
          consequences: host.closed
            ? ["Machines can be started and claimed again. Those that are kept warm are started."]
            : [
                isKnown
                  ? `${plural(on, "machine that is on is", "machines that are on are")} stopped, each with the grace period of its catalog.`
                  : "All machines that are on are stopped, each with the grace period of its catalog. How many these are is not known.",
                "Machines that do not keep data lose what they wrote.",
                ...(claimed
                  ? [`${plural(claimed, "machine is", "machines are")} claimed: somebody may be using them.`]
                  : []),
                "No machine is started or claimed until the host is opened, or is started again itself.",
              ],
          verb: host.closed ? "Open" : "Close",
          isDestructive: !host.closed && (on > 0 || !isKnown),
          ...(!host.closed && (on > 0 || !isKnown) ? { typed: "close" } : {}),
          command: `spillway host ${action}`,
          run: () => api.post("/v1/host", { body: { action }, ifMatch: etag ?? undefined }),
          done: host.closed ? "The host is open." : "The host is closed.",
        })
      }
    >
      {host.closed ? "Open the host" : "Close the host"}
    </button>
  );
}

function Budget({ host, rows }: { host: Host; rows: CatalogRow[] }) {
  const b = host.budget;
  // Without figures, how much of it is used is not known.
  const used = figures.value ? rows.reduce((n, r) => n + r.levels.ram_used_bytes, 0) : null;
  const limits = Math.max(b.ram_bytes, used ?? 0);
  return (
    <Panel
      title="RAM for write caches"
      aside={
        <>
          limits: {bytes(b.ram_bytes)} of the budget of {bytes(b.ram_limit_bytes)}
        </>
      }
    >
      <StackedBar
        label={`Budget for write caches: ${used === null ? "" : `${bytes(used)} used, `}limits of ${bytes(b.ram_bytes)} in a budget of ${bytes(b.ram_limit_bytes)}`}
        whole={b.ram_limit_bytes}
        segments={[
          ...(used === null ? [] : [{ name: "used", value: used, kind: "ram" }]),
          {
            name: used === null ? "limits" : "not used of the limits",
            value: limits - (used ?? 0),
            kind: "ram-soft",
          },
          { name: "free", value: Math.max(0, b.ram_limit_bytes - limits), kind: "none" },
        ]}
      />
      <Facts
        items={[
          ["Guaranteed", `${bytes(b.ram_guaranteed_bytes)} of ${bytes(b.ram_guarantee_limit_bytes)}`],
          ...(host.hypervisor === "none"
            ? []
            : ([
                ["Guests", `${bytes(b.guest_bytes)} of memory, ${b.vcpus} of ${b.vcpu_limit} processors`],
                [
                  "Guests and caches",
                  `${bytes(b.guest_bytes + b.ram_bytes)} of ${bytes(b.memory_limit_bytes)}`,
                ],
              ] as [string, string][])),
          ["Reserved for the host", bytes(b.reserve_bytes)],
        ]}
      />
    </Panel>
  );
}

function Machines({ rows }: { rows: CatalogRow[] }) {
  const sum = (of: (r: CatalogRow) => number) => rows.reduce((n, r) => n + of(r), 0);
  const all = sum((r) => total(r.counts));
  const phases: [string, number, string][] = [
    ["ready", sum((r) => r.counts.ready), "good"],
    ["running, not ready", sum((r) => Math.max(0, r.counts.running - r.counts.ready)), "note"],
    ["starting", sum((r) => r.counts.starting), "note-soft"],
    ["waiting", sum((r) => r.counts.waiting), "warning"],
    ["failed", sum((r) => r.counts.failed), "critical"],
    ["stopping", sum((r) => r.counts.stopping), "none"],
    ["stopped", sum((r) => r.counts.stopped), "none"],
  ];
  const rates = sumRates(rows.map((r) => r.rates));
  const history = useObject<History>("/v1/history?seconds=600", 10_000);
  const samples = history.data ? samplesOf(history.data) : [];
  const peak = Math.max(0, ...samples.map((s) => s.ramWritten + s.overflowWritten));
  return (
    <Panel title="Machines" aside={<a href={href(["machines"])}>{plural(all, "machine")}</a>}>
      {all === 0 ? (
        <div class="empty">
          There are no machines yet. <a href={href(["catalogs", "new"])}>Make a catalog</a>
        </div>
      ) : (
        <StackedBar
          label={`Machines by phase: ${phases.map(([n, v]) => `${v} ${n}`).join(", ")}`}
          whole={all}
          segments={phases
            .filter(([, v]) => v > 0)
            .map(([name, value, kind]) => ({ name, value, kind, text: count(value) }))}
        />
      )}
      {samples.length ? (
        <div class="wide-spark">
          <Spark
            samples={samples}
            width={640}
            height={56}
            label="Written to RAM tier and overflow in the last ten minutes"
          />
          <ul class="legend">
            <li>
              <span class="swatch ram" aria-hidden="true" /> written to RAM tier
            </li>
            <li>
              <span class="swatch overflow" aria-hidden="true" /> written to overflow
            </li>
            <li class="muted">the last ten minutes, peak {rate(peak)}</li>
          </ul>
        </div>
      ) : null}
      <Facts
        items={[
          ["Claimed", String(sum((r) => r.counts.claimed))],
          ["Warm", `${sum((r) => Math.min(r.warm, r.counts.available))} of ${sum((r) => r.warm)}`],
          ["Guests write", rate(rates?.guest.written)],
          ["Guests read", rate(rates?.guest.read)],
          ["Overflow", rate(rates ? rates.overflow.read + rates.overflow.written : null)],
          ["Base image", rate(rates?.base.read)],
        ]}
      />
    </Panel>
  );
}

function Spared({ rows, since }: { rows: CatalogRow[]; since: string }) {
  const spared = rows.reduce((n, r) => n + r.sparedBytes, 0);
  const written = rows.reduce((n, r) => n + (r.counters.guest?.written_bytes ?? 0), 0);
  return (
    <Panel title="Spared" aside="never reached a disk">
      <p class="big">{bytes(spared)}</p>
      <p class="hint">
        {written > 0
          ? `${percent(Math.min(1, spared / written))} of ${bytes(written)} that guests wrote`
          : "Guests have written nothing"}
        {` since the daemon started (${since.slice(0, 16).replace("T", " ")} UTC)`}
      </p>
    </Panel>
  );
}

function Stores({
  stores,
  silent,
  error,
}: {
  stores: Store[] | undefined;
  silent: Store[];
  error: Error | null;
}) {
  return (
    <Panel title="Stores" aside={<a href={href(["stores"])}>Details</a>}>
      {stores ? (
        stores.map((s) => {
          const used = s.space ? s.space.total_bytes - s.space.free_bytes : 0;
          return (
            <div class="store" key={s.name}>
              <div class="gauge-head">
                <span>
                  {s.name} <span class="muted">{s.class}</span>
                </span>
                {s.space === null || s.space === undefined ? (
                  <Badge tone="warning">not measured</Badge>
                ) : silent.includes(s) ? (
                  <Badge tone="critical">no answer</Badge>
                ) : (
                  <strong>{bytes(s.space.free_bytes)} free</strong>
                )}
              </div>
              {s.space ? (
                <>
                  <svg viewBox="0 0 200 8" preserveAspectRatio="none" aria-hidden="true">
                    <rect class="track" width="200" height="8" rx="2" />
                    <rect
                      class={`fill ${s.space.level === "normal" ? "ink" : s.space.level}`}
                      width={(200 * used) / s.space.total_bytes}
                      height="8"
                      rx="2"
                    />
                  </svg>
                  <div class="gauge-foot">
                    {silent.includes(s) ? "last known: " : ""}
                    {percent(used / s.space.total_bytes, 0)} of {bytes(s.space.total_bytes)} used
                    {typeof s.space.seconds_to_full === "number" && s.space.seconds_to_full < SOON_SECONDS
                      ? `, full in ${duration(s.space.seconds_to_full)}`
                      : ""}
                  </div>
                </>
              ) : null}
            </div>
          );
        })
      ) : (
        <Pending error={error} what="the stores" />
      )}
    </Panel>
  );
}
