// One catalog of the fleet: its machines by host, its rollout and versions, its settings.
import {
  ApiError,
  against,
  ask,
  Badge,
  Command,
  Facts,
  FIELDS,
  href,
  lacks,
  Notice,
  now,
  PageHead,
  Panel,
  Pending,
  queryValue,
  raw,
  StackedBar,
  shown,
  Tabs,
} from "../shared.ts";
import type { ImageDetails } from "../api/client.ts";
import { line } from "../commands.ts";
import { ago, clock, duration, plural } from "../ui/format.ts";
import {
  changeRollout,
  deleteCatalog,
  redactedReason,
  type RolloutAction,
  rollBack,
  scale,
  update,
} from "./catalog-acts.ts";
import { ActButton, hostHref, SHARE_HEADS, ShareCells } from "./host.tsx";
import { useCatalog, useFleet, useHosts } from "./read.ts";
import {
  type FleetCatalog,
  type FleetRollout,
  fleetSettings,
  imageOf,
  isOpen,
  keepsData,
  rolloutText,
  rolloutTone,
  totals,
} from "./words.ts";

/** Asks for an update, with the versions that the host has: to know them is a help, not a condition. */
async function askForUpdate(catalog: FleetCatalog): Promise<void> {
  let here: number[] = [];
  try {
    const { body } = await raw<ImageDetails>("GET", `/v1/images/${encodeURIComponent(imageOf(catalog))}`);
    here = body.versions.filter((v) => v.state === "ready").map((v) => v.version);
  } catch {
    // The host has no such image, or does not answer: the version is typed all the same.
  }
  ask(
    update(
      catalog,
      here.sort((a, b) => b - a),
    ),
  );
}

export function FleetCatalogPage({ name }: { name: string }) {
  const { data: catalog, error } = useCatalog(name);
  const crumbs = [{ text: "Fleet catalogs", to: ["fleet-catalogs"] }];
  if (!catalog) {
    return (
      <>
        <PageHead title={name} crumbs={crumbs} />
        {error instanceof ApiError && error.code === "not_found" ? (
          <Notice>The fleet has no catalog {name}.</Notice>
        ) : (
          <Pending error={error} what="the catalog" />
        )}
      </>
    );
  }
  const { ready, claimed, failed, hosts } = totals(catalog.shares);
  const tab = queryValue("tab") ?? "hosts";
  return (
    <>
      <PageHead
        title={name}
        crumbs={crumbs}
        about={
          <span class="counts">
            <span>
              {imageOf(catalog)}:{catalog.version}
            </span>
            <span>
              {ready} of {plural(catalog.spec.count ?? 0, "machine")} ready on {plural(hosts, "host")}
            </span>
            {claimed ? <Badge>{claimed} claimed</Badge> : null}
            {failed ? <Badge tone="critical">{failed} failed</Badge> : null}
            {catalog.unplaced ? <Badge tone="warning">{catalog.unplaced} unplaced</Badge> : null}
            {isOpen(catalog.rollout) ? (
              <Badge tone={rolloutTone(catalog.rollout)}>{rolloutText(catalog.rollout)}</Badge>
            ) : null}
          </span>
        }
        acts={
          <>
            <ActButton act={scale(catalog)} reason={redactedReason(catalog)} />
            <button type="button" {...against(lacks("admin"))} onClick={() => void askForUpdate(catalog)}>
              Update
            </button>
            <ActButton act={deleteCatalog(catalog)} />
          </>
        }
      />
      {keepsData(catalog) ? (
        <Notice>
          These machines keep data, each on its host: they stay there, and are not replaced when the host is
          drained or lost.
        </Notice>
      ) : null}
      {isOpen(catalog.rollout) ? <Rollout catalog={catalog} rollout={catalog.rollout} /> : null}
      <Tabs
        label={`Parts of ${name}`}
        tabs={[
          { key: "hosts", title: "Hosts", note: String(hosts) },
          { key: "versions", title: "Versions" },
          { key: "settings", title: "Settings" },
        ]}
      />
      {tab === "hosts" ? <Hosts catalog={catalog} /> : null}
      {tab === "versions" ? <Versions catalog={catalog} /> : null}
      {tab === "settings" ? <Settings catalog={catalog} /> : null}
    </>
  );
}

function Hosts({ catalog }: { catalog: FleetCatalog }) {
  const fleet = useFleet();
  const hosts = useHosts();
  const zones = new Map(hosts.data?.map((h) => [h.name, h.zone]));
  const because = Object.entries(catalog.unplaced_because ?? {});
  const more = catalog.unplaced_more_hosts;
  return (
    <>
      {catalog.unplaced ? (
        <Notice tone="warning">
          <strong>{plural(catalog.unplaced, "machine finds", "machines find")} no host.</strong>
          {because.length ? (
            <ul>
              {because.map(([host, why]) => (
                <li key={host}>
                  <strong>{host}</strong>: {why}
                </li>
              ))}
              {more ? <li>and {plural(more, "further host", "further hosts")}</li> : null}
            </ul>
          ) : (
            " Only the host that places knows why, and it does not answer."
          )}
        </Notice>
      ) : null}
      <Panel title="Machines by host" aside="as reported at most ten seconds ago" flush>
        <table aria-label="Machines by host">
          <thead>
            <tr>
              <th scope="col">Host</th>
              <th scope="col">Zone</th>
              {SHARE_HEADS.map((head) => (
                <th key={head} scope="col" class="figure">
                  {head}
                </th>
              ))}
              <th scope="col">Refused because</th>
            </tr>
          </thead>
          <tbody>
            {catalog.shares.map((share) => (
              <tr key={share.host}>
                <th scope="row">
                  <span class="counts">
                    <a href={href(["fleet", share.host])}>{share.host}</a>
                    <a
                      href={`${hostHref(["machines"], share.host, fleet.data?.host)}?catalog=${catalog.name}`}
                      aria-label={`Machines of ${catalog.name} on ${share.host}`}
                    >
                      machines
                    </a>
                  </span>
                </th>
                <td>{zones.get(share.host) ?? "-"}</td>
                <ShareCells share={share} />
                <td>{share.refused ? <span class="long-text">{share.refused}</span> : "-"}</td>
              </tr>
            ))}
            {catalog.shares.length ? null : (
              <tr class="none">
                <td colSpan={SHARE_HEADS.length + 3}>No host has machines of it.</td>
              </tr>
            )}
          </tbody>
        </table>
      </Panel>
    </>
  );
}

function Rollout({ catalog, rollout }: { catalog: FleetCatalog; rollout: FleetRollout }) {
  const { state, hosts, hosts_started, hosts_done } = rollout;
  const under = Math.max(0, hosts_started - hosts_done);
  const rest = Math.max(0, hosts - hosts_started);
  const actions: RolloutAction[] =
    state === "paused" || state === "halted" ? ["resume", "abort"] : ["pause", "abort"];
  return (
    <Panel
      title={`Rollout of ${rollout.to_image}:${rollout.to_version}`}
      aside={
        <Badge tone={rolloutTone(rollout)}>
          {state}, wave {rollout.wave} of {rollout.waves}
        </Badge>
      }
    >
      <StackedBar
        label={`${hosts_done} of ${hosts} hosts have the version`}
        whole={hosts}
        segments={[
          { name: "hosts done", value: hosts_done, kind: "good", text: String(hosts_done) },
          { name: "under way", value: under, kind: "note", text: String(under) },
          { name: `still with ${rollout.from_version}`, value: rest, kind: "none", text: String(rest) },
        ].filter((segment) => segment.value > 0)}
      />
      {rollout.reason ? (
        <Notice tone={state === "halted" ? "critical" : "note"}>
          {state === "halted" ? <strong>It has halted: no further machine is restarted. </strong> : null}
          {rollout.reason}
        </Notice>
      ) : null}
      <Facts
        items={[
          ["From", `${rollout.from_image}:${rollout.from_version}`],
          ["Waves", catalog.spec.waves?.join(", ") || "1, 10%, 50%, 100%"],
          ["Failed machines", `${rollout.failed}, allowed are ${rollout.max_failed}`],
          ["Asked for", ago(rollout.since, now.value)],
          ["In this state since", ago(rollout.changed, now.value)],
          ["Halts after", `${duration(rollout.deadline_seconds)} without progress`],
        ]}
      />
      <div class="acts">
        {actions.map((action) => (
          <ActButton key={action} act={changeRollout(catalog, rollout, action)} />
        ))}
        <ActButton act={rollBack(catalog, null)} />
      </div>
    </Panel>
  );
}

function Versions({ catalog }: { catalog: FleetCatalog }) {
  const history = [...catalog.history].reverse();
  const on = (version: number) => catalog.shares.filter((s) => s.version === version && s.wanted > 0).length;
  return (
    <Panel title="Versions of this catalog" flush>
      <table aria-label="Versions of this catalog">
        <thead>
          <tr>
            <th scope="col">Version</th>
            <th scope="col">Since</th>
            <th scope="col" class="figure">
              Hosts are to have it
            </th>
            <th scope="col">
              <span class="sr-only">Actions</span>
            </th>
          </tr>
        </thead>
        <tbody>
          {history.map((h, i) => {
            const act = rollBack(catalog, h.version);
            const isOther = h.version !== catalog.version && h.image === history[0]?.image;
            const isFirst = history.findIndex((o) => o.image === h.image && o.version === h.version) === i;
            return (
              <tr key={`${h.version}/${h.since}`}>
                <th scope="row">
                  {h.image}:{h.version} {i === 0 ? <Badge tone="good">current</Badge> : null}
                </th>
                <td>
                  <time dateTime={h.since} title={clock(h.since)}>
                    {ago(h.since, now.value)}
                  </time>
                </td>
                <td class="figure">{isFirst && h.image === history[0]?.image ? on(h.version) : ""}</td>
                <td class="figure">
                  {isOther && isFirst ? <ActButton act={act} text={`Roll back to ${h.version}`} /> : null}
                </td>
              </tr>
            );
          })}
        </tbody>
      </table>
    </Panel>
  );
}

function Settings({ catalog }: { catalog: FleetCatalog }) {
  const { spec, name } = catalog;
  const given = FIELDS.map((f): [string, string] => [
    f.title,
    f.key === "count" ? "" : shown(f, spec[f.key]),
  ]);
  return (
    <>
      <Panel title="Over hosts">
        <Facts items={fleetSettings(catalog)} />
      </Panel>
      <Panel title="Machines">
        <Facts items={[["Image", spec.image], ...given.filter(([, text]) => text !== "")]} />
      </Panel>
      <Panel title="Change them">
        <Command
          label="By a file"
          text={`${line("spillway", "fleet", "catalog", "export", name)} >fleet.toml\n# Edit fleet.toml before it is applied\nspillway fleet catalog apply -f fleet.toml`}
        />
      </Panel>
    </>
  );
}
