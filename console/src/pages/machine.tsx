// One machine: where its I/O goes now, how full it is, what waits for its next start, and who has it.
import { ask, deleteMachine, keepsData, machineAct, releaseClaim } from "../acts.ts";
import { ApiError, type Catalog, type CatalogSpec, type Machine, type Schemas } from "../api/client.ts";
import { href, queryValue } from "../router.ts";
import { machineRows } from "../state/figures.ts";
import type { MachineRow } from "../state/moments.ts";
import { useObject } from "../state/resource.ts";
import { against, can, lacks } from "../state/session.ts";
import { now } from "../state/visible.ts";
import { ActButton } from "../ui/act-button.tsx";
import { ago, bytes, clock, count, duration, nanoseconds, percent, rate, timeToFull } from "../ui/format.ts";
import { HistoryCharts } from "../ui/history.tsx";
import { LatencyPanel } from "../ui/latency.tsx";
import { LevelBadge, PhaseBadge } from "../ui/machine-cells.tsx";
import { Badge, Command, Facts, Notice, PageHead, Panel, Pending, Tabs } from "../ui/parts.tsx";
import { Gauge, overflowName, PlaneDiagram } from "../ui/planes.tsx";
import { RangesPanel } from "../ui/ranges.tsx";
import { SizingPanel, useMachineCurve } from "../ui/sizing.tsx";
import { EventList } from "./events-list.tsx";
import { ConsoleTab } from "./machine-consoles.tsx";
import { HeldNotice } from "./machine-off.tsx";

export function MachinePage({ name }: { name: string }) {
  const loaded = useObject<Machine>(`/v1/machines/${encodeURIComponent(name)}`);
  const machine = loaded.data;
  const catalog = useObject<Catalog>(machine ? `/v1/catalogs/${encodeURIComponent(machine.catalog)}` : null);
  const row = machineRows.value.find((r) => r.name === name);
  if (!machine) {
    return (
      <>
        <PageHead title={name} crumbs={[{ text: "Machines", to: ["machines"] }]} />
        {loaded.error instanceof ApiError && loaded.error.code === "not_found" ? (
          <Notice>There is no machine {name}.</Notice>
        ) : (
          <Pending error={loaded.error} what="the machine" />
        )}
      </>
    );
  }
  const { status } = machine;
  const act = (action: Schemas["Action"]) =>
    ask(
      machineAct(action, {
        names: [name],
        size: 1,
        claimed: machine.claim ? 1 : 0,
        isKeeping: keepsData(catalog.data?.spec),
        graceSeconds: catalog.data?.spec.grace_seconds,
      }),
    );
  const isOn = machine.power === "on";
  // Each button has a place of its own: no act comes under the pointer in place of another but its opposite.
  const acts: [string, Schemas["Action"]][] = [
    ["power", isOn ? "stop" : "start"],
    ["restart", "restart"],
    ["reset", "reset"],
    ["drain", machine.drained ? "undrain" : "drain"],
  ];
  const tab = queryValue("tab") ?? "disk";
  return (
    <>
      <PageHead
        title={name}
        crumbs={[
          { text: "Catalogs", to: ["catalogs"] },
          { text: machine.catalog, to: ["catalogs", machine.catalog] },
        ]}
        about={
          <span class="counts">
            <PhaseBadge phase={row?.phase ?? status.phase} isReady={row?.ready ?? status.ready} />
            {row ? <LevelBadge row={row} /> : null}
            {machine.claim ? <Badge>claimed by {machine.claim.owner}</Badge> : null}
            {machine.drained ? <Badge>drained</Badge> : null}
            {status.run ? (
              <span>
                {status.run.image}:{status.run.version}
              </span>
            ) : null}
            {status.address ? <code>{status.address}</code> : null}
            {status.since ? <span class="muted">for {duration(Math.max(0, now.value - Date.parse(status.since)) / 1000)}</span> : null}
          </span>
        }
        acts={
          <>
            {acts.map(([place, action]) => (
              <ActButton
                key={place}
                action={action}
                isKeeping={keepsData(catalog.data?.spec)}
                reason={action === "restart" && !isOn ? "The machine is off." : null}
                act={act}
              />
            ))}
            {machine.claim ? (
              <button type="button" {...against(lacks("operate"))} onClick={() => ask(releaseClaim(machine))}>
                Release
              </button>
            ) : null}
            {!isOn && can("admin") ? (
              <button
                type="button"
                class="danger-plain"
                onClick={() => ask(deleteMachine(machine, catalog.data, loaded.etag))}
              >
                Delete
              </button>
            ) : null}
          </>
        }
      />
      {status.message ? (
        <Notice tone={status.phase === "failed" ? "critical" : "warning"}>
          {status.message}
          {status.permanent
            ? " It is not tried again before somebody starts it, or its catalog changes."
            : ""}
        </Notice>
      ) : null}
      <Tabs
        label={`Parts of ${name}`}
        tabs={[
          { key: "disk", title: "Disk" },
          { key: "figures", title: "Figures" },
          { key: "sizing", title: "Sizing" },
          ...(status.run?.console_socket ? [{ key: "serial", title: "Serial" }] : []),
          ...(status.run?.display === "vnc" ? [{ key: "screen", title: "Screen" }] : []),
          { key: "details", title: "Details" },
          { key: "events", title: "Events" },
        ]}
      />
      {tab === "disk" ? <DiskTab machine={machine} row={row} spec={catalog.data?.spec} /> : null}
      {tab === "figures" ? (
        <HistoryCharts of={{ machine: name, catalog: machine.catalog }} samples={row?.samples ?? []} />
      ) : null}
      {tab === "sizing" ? <MachineSizing name={name} machine={machine} /> : null}
      {tab === "serial" || tab === "screen" ? <ConsoleTab name={name} kind={tab} /> : null}
      {tab === "details" ? <Details machine={machine} /> : null}
      {tab === "events" ? (
        <Panel title="Events">
          <EventList of={(e) => e.object === `machine/${name}`} most={500} hasObject={false} />
        </Panel>
      ) : null}
    </>
  );
}

function DiskTab({
  machine,
  row,
  spec,
}: {
  machine: Machine;
  row: MachineRow | undefined;
  spec: CatalogSpec | undefined;
}) {
  const run = machine.status.run;
  const held = <HeldNotice machine={machine} spec={spec} />;
  // The figures of a machine without a disk are zeros, which say nothing about it.
  if (!run) return held;
  if (!row) {
    return (
      <>
        {held}
        <Notice>The disk has not reported its figures yet.</Notice>
      </>
    );
  }
  const c = row.counters;
  const r = row.rates;
  const mode = spec?.mode ?? (spec?.type === "dedicated" ? "persistent" : "ram+overflow");
  return (
    <>
      {held}
      {row.levels.full ? (
        <Notice tone="critical">
          <strong>The write cache is full.</strong> Writes that need space wait, or fail if the catalog says
          so. Overwrites, reads and discards go on.{" "}
          <a href={href(["catalogs", machine.catalog], { tab: "settings" })}>A larger limit</a> lets them go
          on at once.
        </Notice>
      ) : null}
      <div class="grid">
        <div class="column main">
          <Panel
            title="Where the I/O goes"
            aside={row.unresponsive ? <Badge tone="warning">last known figures</Badge> : "now, by the second"}
          >
            <PlaneDiagram levels={row.levels} rates={r} mode={mode} image={`${run.image}:${run.version}`} />
          </Panel>
          <RangesPanel machine={machine.name} />
          {run.pending.length ? <PendingChanges pending={run.pending} /> : null}
          <Panel title="Last events">
            <EventList of={(e) => e.object === `machine/${machine.name}`} most={8} hasObject={false} />
          </Panel>
        </div>
        <div class="column">
          <CachePanel row={row} mode={mode} />
          <Panel title="Requests">
            <Facts
              items={[
                ["Reads", r ? `${count(r.guest.reads)}/s` : "-"],
                ["Writes", r ? `${count(r.guest.writes)}/s` : "-"],
                ["Mean latency", r?.latencyNs == null ? "-" : nanoseconds(r.latencyNs)],
                [
                  "In flight",
                  `${row.levels.inflight}${row.levels.waiting ? `, ${row.levels.waiting} wait for space` : ""}`,
                ],
                [
                  "Stalls",
                  `${count(c.stalls ?? 0)}${c.stall_ns ? `, ${nanoseconds(c.stall_ns)} in all` : ""}`,
                ],
                [
                  "Throttled",
                  r && r.throttled > 0
                    ? `${percent(Math.min(1, r.throttled))} of the time`
                    : c.throttled_ns
                      ? `${nanoseconds(c.throttled_ns)} in all`
                      : "never",
                ],
                ["Failed", count(c.failed_requests ?? 0)],
                ["Spared", bytes(row.sparedBytes)],
              ]}
            />
          </Panel>
          <LatencyPanel machine={machine.name} />
          {machine.claim ? <ClaimPanel claim={machine.claim} /> : null}
        </div>
      </div>
    </>
  );
}

/** How full the tiers are. Modes without a write cache have a file without a limit instead. */
function CachePanel({ row, mode }: { row: MachineRow; mode: string }) {
  const { levels, rates } = row;
  const isCache = levels.ram_limit_bytes > 0 || levels.overflow_limit_bytes > 0;
  if (!isCache) {
    return (
      <Panel title="Disk" aside={`mode ${mode}: no write cache`}>
        <Facts
          items={[
            [overflowName(mode), bytes(levels.overflow_used_bytes)],
            ["Block map", bytes(levels.map_bytes)],
          ]}
        />
      </Panel>
    );
  }
  return (
    <Panel title="Write cache" aside={`${percent(row.fill)} full`}>
      {levels.ram_limit_bytes > 0 ? (
        <Gauge name="RAM tier" plane="ram" used={levels.ram_used_bytes} limit={levels.ram_limit_bytes} />
      ) : null}
      {levels.overflow_limit_bytes > 0 ? (
        <Gauge
          name={overflowName(mode)}
          plane="overflow"
          used={levels.overflow_used_bytes}
          limit={levels.overflow_limit_bytes}
          note={`file ${bytes(levels.overflow_file_bytes)}`}
        />
      ) : null}
      <Facts
        items={[
          ["Full in", timeToFull(row.secondsToFull)],
          ["Evicted", rates ? rate(rates.evicted) : "-"],
          ["Block map", bytes(levels.map_bytes)],
        ]}
      />
    </Panel>
  );
}

function PendingChanges({ pending }: { pending: Schemas["Difference"][] }) {
  const text = (v: unknown) =>
    v === null || v === undefined ? "not set" : typeof v === "string" ? v : JSON.stringify(v);
  return (
    <Panel title="Changed settings" flush>
      <table>
        <thead>
          <tr>
            <th scope="col">Setting</th>
            <th scope="col">Now</th>
            <th scope="col">Then</th>
          </tr>
        </thead>
        <tbody>
          {pending.map((d) => (
            <tr key={d.setting}>
              <th scope="row">
                {d.setting} <Badge>{d.live ? "applied now" : "at the next start"}</Badge>
              </th>
              <td>{text(d.now)}</td>
              <td>{text((d as { then: unknown }).then)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </Panel>
  );
}

function ClaimPanel({ claim }: { claim: Schemas["Claim"] }) {
  const labels = Object.entries(claim.labels);
  return (
    <Panel title="Claim">
      <Facts
        items={[
          ["Owner", claim.owner],
          ["Since", ago(claim.since, now.value)],
          ["Left", claim.left_seconds == null ? "until it is released" : duration(claim.left_seconds)],
          ...(labels.length
            ? ([["Labels", labels.map(([k, v]) => `${k}=${v}`).join(", ")]] as [string, string][])
            : []),
        ]}
      />
    </Panel>
  );
}

function MachineSizing({ name, machine }: { name: string; machine: Machine }) {
  const limit = machine.status.run?.ram_bytes ?? null;
  const { sizing, error } = useMachineCurve(limit === null ? null : name);
  if (limit === null)
    return <Notice>The machine has no RAM tier now. A curve is counted while its disk is served.</Notice>;
  if (!sizing) return <Pending error={error} what="the curve" />;
  return (
    <Panel
      title="How much RAM is enough"
      aside={
        <a href={href(["catalogs", machine.catalog], { tab: "sizing" })}>The limit is set for the catalog</a>
      }
    >
      <SizingPanel sizing={sizing} limit={limit} machines={1} />
    </Panel>
  );
}

function Details({ machine }: { machine: Machine }) {
  const run = machine.status.run;
  return (
    <>
      <Panel title="Identity">
        <Facts
          items={[
            ["Number", String(machine.number)],
            ["MAC address", <code key="mac">{machine.identity.mac}</code>],
            ["UUID", <code key="uuid">{machine.identity.uuid}</code>],
            ["Created", clock(machine.created)],
          ]}
        />
      </Panel>
      {run ? (
        <Panel title="What it runs with">
          <Facts
            items={[
              ["Hypervisor", run.hypervisor],
              ["VMM process", run.vmm_pid ? String(run.vmm_pid) : "-"],
              ["Disk process", run.disk_pid ? String(run.disk_pid) : "-"],
              ["Crashes since its start", String(run.crashes)],
              ["vhost-user socket", <code key="disk">{run.disk_socket}</code>],
              ["NBD socket", run.nbd_socket ? <code key="nbd">{run.nbd_socket}</code> : "-"],
              ["Control socket", <code key="control">{run.control_socket}</code>],
              ["Serial console", run.console_socket ? <code key="console">{run.console_socket}</code> : "-"],
            ]}
          />
          <Command
            label="On the host"
            text={`spillway stats ${run.control_socket}\nspillway machine console ${machine.name}`}
          />
        </Panel>
      ) : null}
    </>
  );
}
