// What is wrong with the host, the worst first, each with what mends it. Pure but for the acts, which a person has to confirm.
//
// Invariant: an act is offered beside a trouble only if it mends it at once. Otherwise words or a link say what to do.
import type { ComponentChildren } from "preact";
import { canEnlarge, enlargeAct, machineAct, machinesTarget } from "../acts.ts";
import { all, type Catalog, type Figures, type Host, type Machine, type Store } from "../api/client.ts";
import { href } from "../router.ts";
import type { CatalogRow } from "../state/moments.ts";
import { can, type Role } from "../state/session.ts";
import type { Act } from "../ui/dialog.tsx";
import { bytes, duration, plural } from "../ui/format.ts";
import { askFor } from "../ui/offers.tsx";
import { Badge } from "../ui/parts.tsx";

export interface Trouble {
  key: string;
  tone: "critical" | "warning";
  what: string;
  /** What mends it. */
  remedy: ComponentChildren;
  /** The act that mends it at once, if there is one. */
  mend?: Mend | undefined;
}

interface Mend {
  verb: string;
  role: Role;
  /** The act to ask for, or what finds it out first. */
  act(): Act | Promise<Act>;
}

export const SOON_SECONDS = 86_400;

/** The stores of a list that are not among those of the figures, which have answered in time. */
export function silent(stores: Store[] | undefined, answered: Figures["stores"] | undefined): Store[] {
  if (!stores || !answered) return [];
  const names = new Set(answered.map((s) => s.name));
  return stores.filter((s) => !names.has(s.name));
}

/** Starts the machines of a catalog that have failed. */
async function startFailed(name: string, catalog: Catalog | undefined): Promise<Act> {
  const machines = await all<Machine>(`/v1/machines?catalog=${encodeURIComponent(name)}`);
  const failed = machines
    .filter((m) => m.status.phase === "failed")
    .map((m) => ({ name: m.name, catalog: name, claimed: m.claim !== null }));
  if (failed.length === 0) throw new Error(`No machine of ${name} is failed any more.`);
  const names = failed.map((m) => m.name);
  return machineAct("start", machinesTarget(names, failed, catalog ? [catalog] : undefined));
}

function ofCatalog(row: CatalogRow, catalog: Catalog | undefined): Trouble[] {
  const { name, levels, counts } = row;
  const found: Trouble[] = [];
  const add = (tone: Trouble["tone"], kind: string, what: string, remedy: ComponentChildren, mend?: Mend) =>
    found.push({ key: `${kind}/${name}`, tone, what, remedy, mend });
  const machines = (text: string, state: string) => (
    <>
      {text} <a href={href(["machines"], { catalog: name, state })}>Show the machines</a>
    </>
  );
  const settings = (text: string, link = "Change the limit") => (
    <>
      {text} <a href={href(["catalogs", name], { tab: "settings" })}>{link}</a>
    </>
  );
  const caches = (n: number) => plural(n, "write cache is", "write caches are");
  const enlarge: Mend | undefined =
    catalog && canEnlarge(catalog)
      ? { verb: "Double the limit", role: "admin", act: () => enlargeAct(catalog) }
      : undefined;
  if (levels.full)
    add(
      "critical",
      "full",
      `${caches(levels.full)} full in ${name}: writes wait or fail`,
      settings("A larger limit lets them go on at once."),
      enlarge,
    );
  if (levels.degraded)
    add(
      "critical",
      "degraded",
      `Overflow writes fail repeatedly in ${name} (${plural(levels.degraded, "disk")})`,
      settings(
        "Give the catalog an overflow store on another device, and restart its machines. Machines that do not keep data lose what they wrote.",
        "Change the store",
      ),
    );
  if (counts.failed)
    add(
      "critical",
      "failed",
      `${plural(counts.failed, "machine has", "machines have")} failed in ${name}`,
      machines("Each says why, and what to do.", "failed"),
      { verb: "Start them again", role: "operate", act: () => startFailed(name, catalog) },
    );
  if (levels.stalled)
    add(
      "critical",
      "stalled",
      `${plural(levels.stalled, "disk waits", "disks wait")} for chunks of a streamed image in ${name}`,
      <a href={href(["stores"])}>Check the registry</a>,
    );
  if (levels.critical > levels.full)
    add(
      "critical",
      "critical",
      `${caches(levels.critical - levels.full)} at the critical level in ${name}`,
      settings("Raise the limit before writes wait."),
      enlarge,
    );
  if (levels.warning > levels.critical)
    add(
      "warning",
      "warning",
      `${caches(levels.warning - levels.critical)} above the warning threshold in ${name}`,
      <a href={href(["catalogs", name], { tab: "sizing" })}>See how much RAM is enough</a>,
    );
  if (row.unresponsiveDisks)
    add(
      "warning",
      "unresponsive",
      `${plural(row.unresponsiveDisks, "disk has", "disks have")} not reported in time in ${name}`,
      machines("Their figures are the last known.", "unresponsive"),
    );
  const progress = catalog?.rollout?.progress;
  if (progress?.state === "stalled")
    add(
      "warning",
      "rollout",
      `The rollout of ${name} is stalled: ${progress.reason ?? "machines are in its way"}`,
      <a href={href(["catalogs", name], { tab: "versions" })}>See what is in the way</a>,
    );
  return found;
}

function ofStore({ name, space }: Store, isSilent: boolean): Trouble | null {
  const key = `store/${name}`;
  if (!space)
    return {
      key,
      tone: "warning",
      what: `The space of the store ${name} is not known: it has not been measured`,
      remedy: "If it does not answer soon, see that its file system is mounted.",
    };
  if (isSilent)
    return {
      key,
      tone: "critical",
      what: `The store ${name} has not answered in time`,
      remedy: "See that its file system is mounted. One that hangs also delays the answers of the others.",
    };
  if (space.level !== "normal")
    return {
      key,
      tone: space.level,
      what: `The store ${name} has ${bytes(space.free_bytes)} free`,
      remedy: <a href={href(["stores"])}>Free space</a>,
    };
  const soon = space.seconds_to_full;
  return typeof soon === "number" && soon < SOON_SECONDS
    ? {
        key,
        tone: "warning",
        what: `The store ${name} will be full in ${duration(soon)} at the present rate`,
        remedy: <a href={href(["stores"])}>See what uses it</a>,
      }
    : null;
}

function ofHost(host: Host): Trouble[] {
  const { waiting } = host.budget;
  const waits: Trouble = {
    key: "waiting",
    tone: "warning",
    what: `${plural(waiting, "machine waits", "machines wait")} because the budget of the host is used up`,
    remedy: (
      <>
        Stop machines, lower limits, or raise --ram-budget of spillwayd.{" "}
        <a href={href(["machines"], { state: "waiting" })}>Show the machines</a>
      </>
    ),
  };
  const records = host.unreadable.map(
    (record): Trouble => ({
      key: `record/${record.key}`,
      tone: "critical",
      what: `The record ${record.key} cannot be read: ${record.why}`,
      remedy: record.advice,
    }),
  );
  return [...(waiting ? [waits] : []), ...records];
}

/** What is wrong with the host as far as it is known, the worst first. */
export function troubles(
  host: Host | undefined,
  stores: Store[] | undefined,
  rows: CatalogRow[],
  catalogs: Catalog[] | undefined,
  answered?: Figures["stores"],
): Trouble[] {
  const unanswered = silent(stores, answered);
  const found = [
    ...rows.flatMap((row) =>
      ofCatalog(
        row,
        catalogs?.find((c) => c.name === row.name),
      ),
    ),
    ...(stores ?? []).flatMap((store) => ofStore(store, unanswered.includes(store)) ?? []),
    ...(host ? ofHost(host) : []),
  ];
  return found.sort((a, b) => Number(a.tone !== "critical") - Number(b.tone !== "critical"));
}

export function Troubles({ found }: { found: Trouble[] }) {
  if (found.length === 0) return null;
  return (
    <section class="troubles" aria-label="What is wrong">
      <ul>
        {found.map((t) => (
          <li key={t.key} class={t.tone}>
            <Badge tone={t.tone}>{t.tone}</Badge>
            <div>
              <strong>{t.what}</strong>
              <div class="remedy">{t.remedy}</div>
            </div>
            {t.mend ? <MendButton mend={t.mend} what={t.what} /> : null}
          </li>
        ))}
      </ul>
    </section>
  );
}

function MendButton({ mend, what }: { mend: Mend; what: string }) {
  const isAllowed = can(mend.role);
  return (
    <button
      type="button"
      aria-label={`${mend.verb}: ${what}`}
      disabled={!isAllowed}
      title={isAllowed ? undefined : `This needs the role ${mend.role}.`}
      onClick={() => void askFor(mend.act)}
    >
      {mend.verb}
    </button>
  );
}
