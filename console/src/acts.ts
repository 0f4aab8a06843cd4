// Acts on machines and catalogs, each with its consequences in words and the equal command.
//
// Invariant: whatever is lost is named before it is lost.
import { signal } from "@preact/signals";
import { api, type Catalog, keysByContent, type Machine, newKey, type Schemas } from "./api/client.ts";
import { changeCommand, line, parseTtl } from "./commands.ts";
import { inTurn, type Piece } from "./pieces.ts";
import { navigate } from "./router.ts";
import { announce } from "./ui/announce.tsx";
import { type Act, ask } from "./ui/dialog.tsx";
import { bytes, count, plural } from "./ui/format.ts";

type Action = Schemas["Action"];

/** Names that one request may have. */
const MOST_NAMES = 1000;

/** Whether machines keep what they wrote when they stop; null: it is not known. */
export type Keeping = boolean | "some" | null;

/** Whether machines of a catalog keep what they wrote when they stop; null without the catalog. */
export function keepsData(spec: Schemas["CatalogSpec"] | undefined): boolean | null {
  if (!spec) return null;
  return spec.type === "dedicated" || spec.reset === "never" || spec.mode === "persistent";
}

/** The same of machines of several catalogs, some of which may not be known. */
export function keeping(each: Keeping[]): Keeping {
  // Where it is known of one, that is said; what is not known, the daemon refuses.
  if (each.some((one) => one === true || one === "some")) return each.every((one) => one === true) || "some";
  return each.includes(null) ? null : false;
}

export interface Target {
  /** Machines by name, or all of a catalog. */
  names?: string[];
  catalog?: string;
  /** How many machines that is. */
  size: number;
  claimed: number;
  isKeeping: Keeping;
  /** Of its catalog; undefined: there are several, or it is not known. */
  graceSeconds?: number | undefined;
}

/** Machines of a list, whose catalogs may not have been read yet. */
export function machinesTarget(
  names: string[],
  rows: { name: string; catalog: string; claimed: boolean }[],
  catalogs: Catalog[] | undefined,
): Target {
  const chosen = new Set(names);
  const machines = rows.filter((r) => chosen.has(r.name));
  const owners = [...new Set(machines.map((m) => m.catalog))];
  const specs = owners.map((owner) => catalogs?.find((c) => c.name === owner)?.spec);
  return {
    names,
    size: names.length,
    claimed: machines.filter((m) => m.claimed).length,
    isKeeping: keeping(specs.map(keepsData)),
    graceSeconds: specs.length === 1 ? specs[0]?.grace_seconds : undefined,
  };
}

function lossOf(isKeeping: Keeping): string {
  switch (isKeeping) {
    case true:
      return "What the machines wrote is kept.";
    case "some":
      return "Machines whose catalog keeps data keep what they wrote. What the others wrote is gone.";
    case null:
      return "Whether what the machines wrote is kept is not known: not all of their catalogs have been read.";
    case false:
      return "What the machines wrote since they were started is gone.";
  }
}

function lossOfReset(isKeeping: Keeping): string {
  switch (isKeeping) {
    case true:
      return "Everything that the machines wrote is gone, also what they keep over restarts.";
    case "some":
      return "Everything that the machines wrote is gone, also what some of them keep over restarts.";
    case null:
      return "What the machines wrote is gone. Not all of their catalogs have been read: if one keeps data, the daemon refuses.";
    case false:
      return "What the machines wrote since they were started is gone.";
  }
}

function consequences(action: Action, target: Target): string[] {
  const grace = target.graceSeconds ?? null;
  const asked =
    grace === null
      ? "Each guest is asked to shut down, and is ended after the grace period of its catalog."
      : `Each guest is asked to shut down, and is ended after ${grace} s.`;
  const lost = lossOf(target.isKeeping);
  const used = target.claimed
    ? [`${plural(target.claimed, "machine is", "machines are")} claimed: somebody may be using them.`]
    : [];
  switch (action) {
    case "start":
      return ["The machines are started. Machines that do not fit the budget of the host wait."];
    case "stop":
      return [asked, lost, ...used];
    case "restart":
      return [
        asked,
        lost,
        target.isKeeping === false
          ? "They start again with the version that their catalog has now."
          : "A machine that keeps its disk keeps its version. The others start with the current version of their catalog.",
        ...used,
      ];
    case "reset":
      return [
        lossOfReset(target.isKeeping),
        "The guests end at once, without being asked to shut down.",
        "Machines that ran start again. Stopped ones stay off.",
        ...used,
      ];
    case "drain":
      return [
        "Each machine stops as soon as it is not claimed, and is not started or claimed again until it is undrained.",
        target.isKeeping === false ? "What the machines wrote is gone when they stop." : lost,
      ];
    case "undrain":
      return ["The machines can be started and claimed again."];
  }
}

const VERB: Record<Action, string> = {
  start: "Start",
  stop: "Stop",
  restart: "Restart",
  reset: "Reset",
  drain: "Drain",
  undrain: "Undrain",
};

/** What the daemon does as soon as an act is recorded. */
const DONE: Record<Action, string> = {
  start: "Starting",
  stop: "Stopping",
  restart: "Restarting",
  reset: "Resetting",
  drain: "Draining",
  undrain: "No longer draining",
};

/** Whether data that machines keep is lost: then a name has to be typed, or a number. */
function isLosing(action: Action, { isKeeping }: Target): boolean {
  return action === "reset" && (isKeeping === true || isKeeping === "some");
}

/** Names in portions that a request takes. */
function portions(names: string[]): string[][] {
  return Array.from({ length: Math.ceil(names.length / MOST_NAMES) }, (_, i) =>
    names.slice(i * MOST_NAMES, (i + 1) * MOST_NAMES),
  );
}

/** The requests of an act on the machines of a target. Each has a key: sent again, it does nothing more. */
function requests(action: Action, target: Target): Piece[] {
  const discard = isLosing(action, target) ? { discard_data: true } : {};
  const piece = (what: string, size: number, select: Schemas["Selector"]): Piece => {
    const key = newKey();
    return {
      what,
      size,
      send: () => api.post("/v1/machine-actions", { key, body: { action, select, ...discard } }),
    };
  };
  if (target.catalog !== undefined) return [piece(target.catalog, target.size, { catalog: target.catalog })];
  return portions(target.names ?? []).map((names) =>
    piece(names.length === 1 ? `${names[0]}` : `${names[0]} to ${names.at(-1)}`, names.length, { names }),
  );
}

function commands(action: Action, target: Target): string {
  const data = isLosing(action, target) && "--discard-data";
  const command = (...who: string[]) => line("spillway", "machine", action, ...who, data);
  if (target.catalog !== undefined) return command("--catalog", target.catalog);
  return portions(target.names ?? [])
    .map((names) => command(...names))
    .join("\n");
}

/** An act on machines, in as many requests as it needs. */
function actOn(
  action: Action,
  who: string,
  all: Target,
  pieces: Piece[],
  words: { typed: string; notes: string[]; command: string },
): Act & { command: string } {
  const progress = signal(`This takes ${plural(pieces.length, "request")}, one after the other.`);
  const tell = (done: number) => {
    progress.value = `Recorded for ${count(done)} of ${plural(all.size, "machine")}.`;
    announce(progress.value);
  };
  return {
    title: `${VERB[action]} ${who}?`,
    consequences: [...consequences(action, all), ...words.notes, ...(pieces.length > 1 ? [progress] : [])],
    verb: VERB[action],
    isDestructive: action === "reset" || action === "stop" || action === "restart",
    ...(isLosing(action, all) ? { typed: words.typed } : {}),
    command: words.command,
    run: () => inTurn(pieces, tell),
    done: `${DONE[action]} ${who}.`,
  };
}

const byNumber = (size: number) => `To confirm, type how many machines these are: ${size}.`;

/** An act on machines of a list, or on all of a catalog. */
export function machineAct(action: Action, target: Target): Act & { command: string } {
  const { catalog, names, size } = target;
  const isOne = catalog === undefined && size === 1;
  const machines = plural(size, "machine");
  const who = catalog === undefined ? machines : `${size === 1 ? "the" : "all"} ${machines} of ${catalog}`;
  const needsNumber = isLosing(action, target) && catalog === undefined && !isOne;
  return actOn(action, isOne ? (names?.[0] ?? "") : who, target, requests(action, target), {
    typed: catalog ?? (isOne ? (names?.[0] ?? "") : String(size)),
    notes: needsNumber ? [byNumber(size)] : [],
    command: commands(action, target),
  });
}

/** An act on all machines of several catalogs. */
export function catalogsAct(action: Action, targets: Target[]): Act & { command: string } {
  const sum = (of: (target: Target) => number) => targets.reduce((n, target) => n + of(target), 0);
  const all: Target = {
    size: sum((t) => t.size),
    claimed: sum((t) => t.claimed),
    isKeeping: keeping(targets.map((t) => t.isKeeping)),
  };
  const kept = targets.filter((t) => isLosing(action, t)).map((t) => t.catalog);
  return actOn(
    action,
    `the ${plural(all.size, "machine")} of ${plural(targets.length, "catalog")}`,
    all,
    targets.flatMap((target) => requests(action, target)),
    {
      typed: String(all.size),
      notes: [
        `The catalogs: ${targets.map((t) => t.catalog).join(", ")}.`,
        ...(kept.length ? [`Kept data is lost in ${kept.join(", ")}.`, byNumber(all.size)] : []),
      ],
      command: targets.map((target) => commands(action, target)).join("\n"),
    },
  );
}

/** Whether files with data of machines of a catalog outlive the machines. Without them, data that is kept is in memory. */
function keepsFiles({ spec }: Catalog): boolean {
  return spec.type === "dedicated" || spec.data_disk_bytes != null;
}

/** Why machines of a catalog cannot be claimed, in words; null if they can. */
export function unclaimable(spec: Schemas["CatalogSpec"]): string | null {
  if (!keepsData(spec) && spec.data_disk_bytes == null) return null;
  return "Machines that keep data cannot be claimed. Start one by its name instead.";
}

/** Deletes a machine, if nobody has changed it since it was read with this tag. */
export function deleteMachine(machine: Machine, catalog: Catalog | undefined, etag: string | null): Act {
  const isLeaving = catalog ? keepsFiles(catalog) : null;
  const kept = "The files of its data stay on the host as leftovers, until they are deleted there.";
  return {
    title: `Delete ${machine.name}?`,
    consequences: [
      "The machine and its identity are gone. A later machine of this name has another MAC address and UUID.",
      `The number of machines of ${machine.catalog} falls by one.`,
      isLeaving === null
        ? `Whether files of its data stay on the host is not known: its catalog has not been read.`
        : isLeaving
          ? kept
          : "What its guest wrote is gone: nothing of it stays on the host.",
    ],
    verb: "Delete",
    isDestructive: true,
    ...(isLeaving === false && catalog && !keepsData(catalog.spec) ? {} : { typed: machine.name }),
    command: line("spillway", "machine", "delete", machine.name),
    run: () =>
      api.delete("/v1/machines/{name}", { path: { name: machine.name }, ifMatch: etag ?? undefined }),
    done: `${machine.name} is deleted.`,
    after: () => navigate(["catalogs", machine.catalog]),
  };
}

export function releaseClaim(machine: Machine): Act {
  return {
    title: `Release ${machine.name}?`,
    consequences: [
      `The claim of ${machine.claim?.owner ?? "its owner"} ends: somebody may be using the machine.`,
      "The machine is reset, or stopped: what was written is gone. Somebody else can claim it then.",
    ],
    verb: "Release",
    isDestructive: true,
    command: line("spillway", "machine", "release", machine.name),
    run: () =>
      api.delete("/v1/machines/{name}/claim", {
        path: { name: machine.name },
        query: { claim: machine.claim?.id },
      }),
    done: `${machine.name} is released.`,
  };
}

export function claimMachine(catalog: Catalog): Act {
  const keyOf = keysByContent();
  return {
    title: `Claim a machine of ${catalog.name}`,
    consequences: [
      "A machine that is ready belongs to the owner until the claim ends. When it is released, it is reset.",
      "If the catalog keeps machines warm, another one is started in its place.",
    ],
    verb: "Claim",
    fields: [
      { key: "owner", label: "Owner", placeholder: "you", hint: "Who gets the machine." },
      {
        key: "ttl",
        label: "For",
        placeholder: "the default of the catalog",
        hint: "Such as 30m, 8h or 7d; none: until it is released.",
        check: (value) =>
          parseTtl(value) === null ? "A time is a number with s, m, h or d, or none." : null,
      },
      {
        key: "any",
        label: "If none is ready",
        options: [
          ["no", "refuse"],
          ["yes", "take another, or start one"],
        ],
      },
    ],
    command: (v) =>
      line(
        "spillway",
        "machine",
        "claim",
        catalog.name,
        ...(v.owner ? ["--owner", v.owner] : []),
        ...(v.ttl ? ["--ttl", v.ttl] : []),
        v.any === "yes" && "--wait",
      ),
    run: async (v) => {
      const ttl = v.ttl ? parseTtl(v.ttl) : null;
      const answer = await api.post("/v1/catalogs/{name}/claims", {
        path: { name: catalog.name },
        key: keyOf(v),
        body: {
          ...(v.owner ? { owner: v.owner } : {}),
          ...(ttl === null ? {} : { ttl_seconds: ttl }),
          ...(v.any === "yes" ? { any: true } : {}),
        },
      });
      return answer.body;
    },
    done: (machine) => `${(machine as Machine).name} is claimed.`,
    after: (machine) => navigate(["machines", (machine as Machine).name]),
  };
}

export function deleteCatalog(catalog: Catalog, running: number): Act {
  const isLeaving = keepsFiles(catalog);
  return {
    title: `Delete the catalog ${catalog.name}?`,
    consequences: [
      `The catalog and its ${plural(catalog.spec.count ?? 0, "machine")} are gone, with their identities.`,
      isLeaving
        ? "The files of kept data stay on the host as leftovers, until they are deleted there."
        : "What the machines wrote is gone: nothing of it stays on the host.",
      ...(running
        ? [
            `${plural(running, "machine that is on is", "machines that are on are")} ended${isLeaving ? ", after the grace period" : " at once"}.`,
          ]
        : []),
      "The daemon refuses this while a machine is claimed.",
    ],
    verb: "Delete",
    isDestructive: true,
    typed: catalog.name,
    command: line("spillway", "catalog", "delete", catalog.name),
    run: () => api.delete("/v1/catalogs/{name}", { path: { name: catalog.name }, ifMatch: tag(catalog) }),
    done: `The catalog ${catalog.name} is deleted.`,
    after: () => navigate(["catalogs"]),
  };
}

/** The tag of a catalog as a header has it. */
export function tag(catalog: Catalog): string {
  return `"${catalog.revision ?? 0}"`;
}

type Spec = Schemas["CatalogSpec"];

/** A spec as a request may have it: without what a response adds. */
export function requestSpec(spec: Spec, changes: Partial<Spec> = {}): Spec {
  const { redacted: _, ...rest } = spec;
  return { ...rest, ...changes };
}

/** Replaces settings of a catalog, if nobody else has changed it since it was read. */
export function putCatalog(catalog: Catalog, changes: Partial<Spec>, isDryRun = false) {
  return api.put("/v1/catalogs/{name}", {
    path: { name: catalog.name },
    query: isDryRun ? { dry_run: true } : {},
    ifMatch: tag(catalog),
    body: requestSpec(catalog.spec, changes),
  });
}

/**
 * Changes settings, with sentences about what that does. A setting that is emptied gets the daemon's default, so what is lost depends
 * on the effective settings, if the daemon has said them.
 */
export function changeAct(
  catalog: Catalog,
  changes: Partial<Spec>,
  title: string,
  lines: Act["consequences"],
  effective?: Spec | null,
): Act {
  const after = effective ?? requestSpec(catalog.spec, changes);
  // Fewer machines: those with the highest numbers are deleted.
  const gone = Math.max(0, (catalog.spec.count ?? 0) - (after.count ?? 0));
  const isLeaving = keepsFiles(catalog);
  const isForgetting = keepsData(catalog.spec) === true && keepsData(after) === false;
  const deleted = [
    `${plural(gone, "machine is", "machines are")} deleted, with ${gone === 1 ? "its identity: the one" : "their identities: those"} with the highest ${gone === 1 ? "number" : "numbers"}. Those that run are ended.`,
    isLeaving
      ? "The files of the data that they kept stay on the host as leftovers."
      : "What they wrote is gone.",
  ];
  return {
    title,
    consequences: [
      ...(gone ? deleted : []),
      ...(isForgetting ? ["The machines no longer keep what they write: it is gone when they stop."] : []),
      ...lines,
    ],
    ...(gone || isForgetting ? { isDestructive: true, typed: catalog.name } : {}),
    verb: "Apply",
    command: changeCommand(catalog.name, changes),
    run: () => putCatalog(catalog, changes),
    done: `${catalog.name} is changed.`,
  };
}

/** Whether the write caches of a catalog have a limit that can be raised. */
export function canEnlarge({ spec }: Catalog): boolean {
  return spec.type !== "dedicated" && ["ram", "overflow", "ram+overflow"].includes(spec.mode ?? "ram+overflow");
}

/** Doubles the limit that decides when the write caches of a catalog are full. */
export async function enlargeAct(catalog: Catalog): Promise<Act> {
  const { name, spec } = catalog;
  const isRam = spec.mode === "ram";
  const [key, what] = isRam
    ? (["ram_bytes", "RAM tier"] as const)
    : (["overflow_bytes", "overflow"] as const);
  // What is not set has the default of the daemon, which says what that is.
  const now = spec[key] ?? (await putCatalog(catalog, {}, true)).body.effective?.[key];
  if (now == null) throw new Error(`The daemon does not say how large the ${what} of ${name} may be.`);
  const then = 2 * now;
  return changeAct(catalog, { [key]: then }, `Double the ${what} of each machine of ${name}?`, [
    `The limit changes from ${bytes(now)} to ${bytes(then)}, for running machines at once.`,
    "Writes that wait for space go on.",
    `If all ${what}s were full, they would take ${bytes(then * (spec.count ?? 0))} ${isRam ? "of the host's memory" : "in their store"}: ${plural(spec.count ?? 0, "machine")} of ${bytes(then)}.`,
  ]);
}

export { ask };
