// Versions of a catalog: which machines run which, what it had before, and how to give it another.
//
// Invariant: what an update would do stands in numbers before it is done.
import { useState } from "preact/hooks";
import { ask, keepsData, tag } from "../acts.ts";
import { api, type Catalog, type ImageDetails, type Machine, type Schemas } from "../api/client.ts";
import { line } from "../commands.ts";
import { href } from "../router.ts";
import { useDryRun } from "../state/dry-run.ts";
import { useList, useObject } from "../state/resource.ts";
import { against, can, lacks } from "../state/session.ts";
import { now } from "../state/visible.ts";
import { ago, clock, duration, parseWhole, plural } from "../ui/format.ts";
import { Badge, Facts, Labelled, Notice, Panel, Pending } from "../ui/parts.tsx";
import { StackedBar } from "../ui/planes.tsx";

type Strategy = Schemas["RolloutStrategy"];

export function CatalogVersions({ catalog }: { catalog: Catalog }) {
  const machines = useList<Machine>(`/v1/machines?catalog=${catalog.name}`);
  const running = new Map<string, number>();
  for (const m of machines.data ?? []) {
    const run = m.status.run;
    if (run)
      running.set(`${run.image}:${run.version}`, (running.get(`${run.image}:${run.version}`) ?? 0) + 1);
  }
  const history = [...catalog.history].reverse();
  return (
    <div class="grid">
      <div class="column main">
        {catalog.rollout ? <RolloutPanel catalog={catalog} rollout={catalog.rollout} /> : null}
        <Panel title="Versions of this catalog" flush>
          <table>
            <thead>
              <tr>
                <th scope="col">Version</th>
                <th scope="col">Since</th>
                <th scope="col" class="figure">
                  Machines have it
                </th>
                <th scope="col">
                  <span class="sr-only">Actions</span>
                </th>
              </tr>
            </thead>
            <tbody>
              {history.map((h, i) => {
                const key = `${h.image}:${h.version}`;
                return (
                  <tr key={`${key}/${h.since}`}>
                    <th scope="row">
                      {key} {i === 0 ? <Badge tone="good">current</Badge> : null}
                    </th>
                    <td>
                      <time dateTime={h.since} title={clock(h.since)}>
                        {ago(h.since, now.value)}
                      </time>
                    </td>
                    <td class="figure">
                      {history.findIndex((o) => `${o.image}:${o.version}` === key) === i
                        ? (running.get(key) ?? 0)
                        : ""}
                    </td>
                    <td class="figure">
                      {i > 0 && h.image === history[0]?.image && h.version !== catalog.version ? (
                        <button
                          type="button"
                          {...against(lacks("admin"))}
                          onClick={() => ask(rollback(catalog, h.version, running))}
                        >
                          Roll back to {h.version}
                        </button>
                      ) : null}
                    </td>
                  </tr>
                );
              })}
            </tbody>
          </table>
        </Panel>
      </div>
      <div class="column">
        {machines.data ? (
          <UpdatePanel catalog={catalog} machines={machines.data} />
        ) : (
          <Pending error={machines.error} what="the machines" />
        )}
      </div>
    </div>
  );
}

function rollback(catalog: Catalog, to: number, running: Map<string, number>) {
  const image = catalog.history.at(-1)?.image ?? catalog.spec.image;
  const others = [...running].filter(([key]) => key !== `${image}:${to}`).reduce((n, [, v]) => n + v, 0);
  return {
    title: `Roll ${catalog.name} back to version ${to}?`,
    consequences: [
      keepsData(catalog.spec) ? KEPT : `Each machine takes ${image}:${to} at its next start.`,
      `${plural(others, "machine runs", "machines run")} another version now.`,
      "The catalog stays at this version: it does not follow the next one that is published.",
      "To restart running machines at once, use an update with a rollout.",
    ],
    verb: "Roll back",
    command: line("spillway", "catalog", "rollback", catalog.name, "--to", String(to)),
    run: () =>
      api.post("/v1/catalogs/{name}/rollback", {
        path: { name: catalog.name },
        ifMatch: tag(catalog),
        body: { to },
      }),
    done: `${catalog.name} is at version ${to}.`,
  };
}

/** What becomes of what restarted machines wrote. */
function lossOf(catalog: Catalog): string {
  return keepsData(catalog.spec)
    ? "What the machines wrote is kept."
    : "What restarted machines wrote is gone.";
}

const DONE: Record<Schemas["RolloutAction"], string> = {
  pause: "paused",
  resume: "resumed",
  abort: "ended",
};

function RolloutPanel({ catalog, rollout }: { catalog: Catalog; rollout: Schemas["Rollout"] }) {
  const p = rollout.progress;
  const change = (action: Schemas["RolloutAction"], verb: string, lines: string[]) =>
    ask({
      title: `${verb} the rollout of ${catalog.name}?`,
      consequences: lines,
      verb,
      isDestructive: action !== "pause",
      command: line("spillway", "catalog", "rollout", action, catalog.name),
      run: () =>
        api.post("/v1/catalogs/{name}/rollout", {
          path: { name: catalog.name },
          ifMatch: tag(catalog),
          body: { action },
        }),
      done: `The rollout of ${catalog.name} is ${DONE[action]}.`,
    });
  const left = p ? Math.max(0, p.of - p.done - p.failed - p.waiting - p.restarting) : 0;
  return (
    <Panel
      title={`Rollout of ${rollout.image}:${rollout.version}`}
      aside={
        <Badge tone={p?.state === "stalled" ? "warning" : "note"}>
          {rollout.paused ? "paused" : (p?.state ?? "running")}
        </Badge>
      }
    >
      {p ? (
        <StackedBar
          label={`${p.done} of ${p.of} machines have the version`}
          whole={p.of}
          segments={[
            { name: "done", value: p.done, kind: "good", text: String(p.done) },
            { name: "restarting", value: p.restarting, kind: "note", text: String(p.restarting) },
            { name: "claimed, not restarted", value: p.waiting, kind: "note-soft", text: String(p.waiting) },
            { name: "failed", value: p.failed, kind: "critical", text: String(p.failed) },
            { name: "to do", value: left, kind: "none", text: String(left) },
          ].filter((segment) => segment.value > 0)}
        />
      ) : null}
      {p?.reason ? <Notice tone="warning">{p.reason}</Notice> : null}
      {p?.in_the_way.length ? (
        <ul class="plain-list">
          {p.in_the_way.map((m) => (
            <li key={m.machine}>
              <a href={href(["machines", m.machine])}>{m.machine}</a>: {m.why}
            </li>
          ))}
        </ul>
      ) : null}
      <Facts
        items={[
          ["Requested", ago(rollout.since, now.value)],
          ["Last progress", p ? ago(p.progressed, now.value) : "-"],
          ["Counts as stalled after", `${duration(rollout.deadline_seconds)} without progress`],
        ]}
      />
      <div class="acts">
        {rollout.paused ? (
          <button
            type="button"
            {...against(lacks("admin"))}
            onClick={() =>
              change("resume", "Resume", [
                `${plural(left, "machine is", "machines are")} still to be restarted, in batches. ${lossOf(catalog)}`,
              ])
            }
          >
            Resume
          </button>
        ) : (
          <button
            type="button"
            {...against(lacks("admin"))}
            onClick={() =>
              change("pause", "Pause", [
                "No further machine is restarted. Those that were restarted go on starting.",
              ])
            }
          >
            Pause
          </button>
        )}
        <button
          type="button"
          {...against(lacks("admin"))}
          onClick={() =>
            change("abort", "Abort", [
              "The rollout ends. Machines that have the version keep it.",
              "The others take it at their next start.",
            ])
          }
        >
          Abort
        </button>
      </div>
    </Panel>
  );
}

const KEPT =
  "The disks of these machines keep what was written: each stays at its version until the machine is reset.";

export interface Update {
  image: string;
  version: number;
  strategy: Strategy;
  claimGraceSeconds?: number | undefined;
  /** Whether the machines keep what they wrote. */
  isKeeping: boolean;
}

/** What an update does to the machines that run now. */
export function outlook(
  machines: Machine[],
  { image, version, strategy, claimGraceSeconds, isKeeping }: Update,
): string[] {
  const on = machines.filter((m) => m.status.run && m.status.phase !== "stopped");
  const others = on.filter((m) => m.status.run?.image !== image || m.status.run?.version !== version);
  const claimed = others.filter((m) => m.claim !== null);
  const have = on.length - others.length;
  if (on.length === 0)
    return isKeeping
      ? [`No machine runs. Machines without a disk take ${image}:${version} at their next start.`, KEPT]
      : [`No machine runs. Each takes ${image}:${version} at its next start.`];
  if (others.length === 0)
    return [
      `${on.length === 1 ? "The one machine that runs has" : `All ${on.length} machines that run have`} ${image}:${version} already.`,
    ];
  const lines = [
    `${plural(others.length, "running machine has", "running machines have")} another version; ${have} of ${on.length} have ${image}:${version} already.`,
  ];
  if (isKeeping) lines.push(KEPT);
  else if (strategy === "next-start")
    lines.push("None is restarted: each takes the version at its next start, whoever starts it.");
  else {
    const free = others.length - claimed.length;
    lines.push(
      strategy === "now"
        ? `${plural(free, "machine is", "machines are")} restarted at once.`
        : `${plural(free, "machine is", "machines are")} restarted, ${strategy.batch} at a time: ${plural(Math.ceil(free / strategy.batch), "batch", "batches")}.`,
    );
    if (claimed.length)
      lines.push(
        claimGraceSeconds === undefined
          ? `${plural(claimed.length, "machine is", "machines are")} claimed, and not restarted until released.`
          : `${plural(claimed.length, "machine is", "machines are")} claimed, and restarted after ${claimGraceSeconds} s also if somebody uses them.`,
      );
  }
  return lines;
}

const MOST_BATCH = 100_000;
const MOST_GRACE_SECONDS = 30 * 86_400;

type Parsed = ReturnType<typeof parseWhole> | undefined;
const isError = (parsed: Parsed): parsed is { error: string } => typeof parsed === "object";

/** A field for a whole number. What is typed stays as it is, also while it is no number. */
function NumberField({
  label,
  placeholder,
  text,
  change,
  parsed,
}: {
  label: string;
  placeholder?: string;
  text: string;
  change(text: string): void;
  parsed: Parsed;
}) {
  const error = isError(parsed) ? parsed.error : undefined;
  return (
    <Labelled label={label} {...(error ? { hint: error } : {})}>
      {(id) => (
        <input
          id={id}
          type="text"
          inputMode="numeric"
          autocomplete="off"
          placeholder={placeholder}
          aria-invalid={error !== undefined}
          aria-describedby={error ? `${id}-hint` : undefined}
          value={text}
          onInput={(e) => change(e.currentTarget.value)}
        />
      )}
    </Labelled>
  );
}

function UpdatePanel({ catalog, machines }: { catalog: Catalog; machines: Machine[] }) {
  const current = catalog.spec.image.split(":")[0] ?? "";
  const images = useList<Schemas["Image"]>("/v1/images");
  const [image, setImage] = useState(current);
  const [version, setVersion] = useState("");
  const [how, setHow] = useState("next-start");
  const [batchText, setBatchText] = useState("1");
  const [graceText, setGraceText] = useState("");
  const details = useObject<ImageDetails>(image ? `/v1/images/${encodeURIComponent(image)}` : null);
  const reference = version ? `${image}:${version}` : image;
  const batch = parseWhole(batchText, 1, MOST_BATCH);
  const grace = graceText === "" ? undefined : parseWhole(graceText, 0, MOST_GRACE_SECONDS);
  const isWrong = (how === "batch" && isError(batch)) || (how !== "next-start" && isError(grace));
  const strategy: Strategy =
    how === "batch" && typeof batch === "number" ? { batch } : how === "now" ? "now" : "next-start";
  const body: Schemas["CatalogUpdate"] = {
    image: reference,
    ...(how === "next-start" ? {} : { rollout: strategy }),
    ...(typeof grace === "number" && how !== "next-start" ? { claim_grace_seconds: grace } : {}),
  };
  const verdict = useDryRun(
    can("admin") && !isWrong ? JSON.stringify([catalog.name, catalog.revision, body]) : null,
    async (signal) => {
      const answer = await api.post("/v1/catalogs/{name}/update", {
        path: { name: catalog.name },
        query: { dry_run: true },
        ifMatch: tag(catalog),
        body,
        signal,
      });
      return answer.body;
    },
  );
  const after = verdict && "answer" in verdict ? verdict.answer : null;
  const lines = after
    ? outlook(machines, {
        image,
        version: after.version,
        strategy,
        claimGraceSeconds: body.claim_grace_seconds ?? undefined,
        isKeeping: keepsData(catalog.spec) === true,
      })
    : [];
  return (
    <Panel title="Update">
      <div class="fields">
        <Labelled label="Image">
          {(id) => (
            <select
              id={id}
              value={image}
              onChange={(e) => {
                setImage(e.currentTarget.value);
                setVersion("");
              }}
            >
              {(images.data ?? []).map((i) => (
                <option key={i.name} value={i.name}>
                  {i.name}
                </option>
              ))}
            </select>
          )}
        </Labelled>
        <Labelled label="Version">
          {(id) => (
            <select id={id} value={version} onChange={(e) => setVersion(e.currentTarget.value)}>
              <option value="">
                the published one
                {details.data?.image.published ? ` (now ${details.data.image.published})` : ""}, and follow it
              </option>
              {(details.data?.versions ?? [])
                .filter((v) => v.state === "ready")
                .reverse()
                .map((v) => (
                  <option key={v.version} value={String(v.version)}>
                    {v.version}, of {v.created.slice(0, 10)}
                  </option>
                ))}
            </select>
          )}
        </Labelled>
        <Labelled label="When machines take it">
          {(id) => (
            <select id={id} value={how} onChange={(e) => setHow(e.currentTarget.value)}>
              <option value="next-start">at their next start</option>
              <option value="batch">some at a time are restarted</option>
              <option value="now">all are restarted now</option>
            </select>
          )}
        </Labelled>
        {how === "batch" ? (
          <NumberField
            label="Restarted at the same time"
            text={batchText}
            change={setBatchText}
            parsed={batch}
          />
        ) : null}
        {how !== "next-start" ? (
          <NumberField
            label="Restart claimed machines after, in seconds"
            placeholder="when released"
            text={graceText}
            change={setGraceText}
            parsed={grace}
          />
        ) : null}
      </div>
      <div class="outlook" aria-live="polite">
        {verdict === null && can("admin") && !isWrong ? <p class="muted">The daemon checks it.</p> : null}
        {verdict && "error" in verdict ? <Notice tone="warning">{verdict.error}</Notice> : null}
        {lines.length ? (
          <ul class="consequences">
            {lines.map((l) => (
              <li key={l}>{l}</li>
            ))}
          </ul>
        ) : null}
      </div>
      <button
        type="button"
        class="primary"
        {...against(lacks("admin") ?? (after ? null : "The daemon has not said what will happen."))}
        onClick={() =>
          ask({
            title: `Update ${catalog.name} to ${reference}?`,
            consequences: [
              ...lines,
              ...(how === "next-start" ? [] : [lossOf(catalog)]),
              ...(after?.warnings ?? []),
            ],
            verb: "Update",
            isDestructive: how !== "next-start",
            command: line(
              "spillway",
              "catalog",
              "update",
              catalog.name,
              "--image",
              reference,
              ...(how === "next-start"
                ? []
                : ["--rollout", typeof strategy === "object" ? `batch=${strategy.batch}` : "now"]),
              ...(body.claim_grace_seconds !== undefined
                ? ["--claim-grace", String(body.claim_grace_seconds)]
                : []),
            ),
            run: () =>
              api.post("/v1/catalogs/{name}/update", {
                path: { name: catalog.name },
                ifMatch: tag(catalog),
                body,
              }),
            done: `${catalog.name} gets ${reference}.`,
          })
        }
      >
        Update
      </button>
    </Panel>
  );
}
