// The wizard for a new catalog. Each step is checked by the daemon itself, with a dry run of what would be sent.
//
// Invariant: a field that nobody filled in is not sent, so every default is the daemon's.
import { signal } from "@preact/signals";
import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import {
  api,
  type Catalog,
  type CatalogSpec,
  type Host,
  type Image,
  type ImageCheck,
  type ImageDetails,
  type Store,
  words,
} from "../api/client.ts";
import { createCommand, curl, machineNames, toml } from "../commands.ts";
import { href, navigate, queryValue } from "../router.ts";
import { useDryRun, type Verdict } from "../state/dry-run.ts";
import { machineRows } from "../state/figures.ts";
import { refresh, useList, useObject } from "../state/resource.ts";
import { can } from "../state/session.ts";
import { announce, toast } from "../ui/announce.tsx";
import { Findings } from "../ui/findings.tsx";
import { bytes, plural } from "../ui/format.ts";
import { Command, Facts, Notice, PageHead, Panel, Pending } from "../ui/parts.tsx";
import { StackedBar } from "../ui/planes.tsx";
import { MOST_CURVES, roundUp, useCurves } from "../ui/sizing.tsx";
import {
  type Draft,
  FIELDS,
  GROUPS,
  type Key,
  SpecField,
  shown,
  type Wrong,
  wrongText,
} from "../ui/spec-form.tsx";

const STEPS = [
  ["image", "Image"],
  ["machines", "Machines"],
  ["cache", "Write cache"],
  ["identity", "Identity"],
  ["review", "Review"],
] as const;
type Step = (typeof STEPS)[number][0];

/** What has been filled in. It is kept while the page lives, so that going elsewhere loses nothing. */
const name = signal("");
const draft = signal<Draft>({});
const wrong = signal<Wrong>({});

function change(key: Key, value: unknown): void {
  const next: Record<string, unknown> = { ...draft.value };
  if (value === undefined || value === "") delete next[key];
  else next[key] = value;
  draft.value = next as Draft;
}

type Checked = Verdict<Catalog> | null;

/** What the daemon says of the draft. */
function useDraftVerdict(): Checked {
  const body = { name: name.value, spec: draft.value as CatalogSpec };
  const isReady = body.name !== "" && Boolean(body.spec.image) && can("admin");
  return useDryRun(isReady ? JSON.stringify(body) : null, async (signal) => {
    const answer = await api.post("/v1/catalogs", { query: { dry_run: true }, body, signal });
    return answer.body;
  });
}

export function NewCatalogPage() {
  const step = (STEPS.find(([key]) => key === queryValue("step"))?.[0] ?? "image") as Step;
  const at = STEPS.findIndex(([key]) => key === step);
  const checked = useDraftVerdict();
  const next = STEPS[at + 1]?.[0];
  const before = STEPS[at - 1]?.[0];
  const isReady = name.value !== "" && Boolean(draft.value.image);
  const incorrect = wrongText(wrong.value);
  const isFirst = useRef(true);
  useEffect(() => {
    if (!isFirst.current) document.getElementById("page-title")?.focus();
    isFirst.current = false;
    announce(`Step ${at + 1} of ${STEPS.length}: ${STEPS[at]?.[1]}`);
  }, [at]);
  if (!can("admin")) {
    return (
      <>
        <PageHead title="New catalog" crumbs={[{ text: "Catalogs", to: ["catalogs"] }]} />
        <Notice>Making a catalog needs the role admin.</Notice>
      </>
    );
  }
  return (
    <>
      <PageHead title="New catalog" crumbs={[{ text: "Catalogs", to: ["catalogs"] }]} />
      <nav class="steps" aria-label="Steps">
        <ol>
          {STEPS.map(([key, title], i) => (
            <li key={key}>
              <a
                href={href(["catalogs", "new"], { step: i ? key : undefined })}
                aria-current={key === step ? "step" : undefined}
              >
                <span class="step-number">{i + 1}</span> {title}
              </a>
            </li>
          ))}
        </ol>
      </nav>
      <div class="wizard">
        {step === "image" ? <ImageStep /> : null}
        {step === "machines" ? <MachinesStep /> : null}
        {step === "cache" ? <CacheStep /> : null}
        {step === "identity" ? (
          <FieldsStep title="Who may log in, and what cloud-init does" group="identity" />
        ) : null}
        {step === "review" ? <ReviewStep checked={checked} /> : null}
      </div>
      <div class="verdict" aria-live="polite">
        {incorrect ? (
          <Notice tone="critical">{incorrect}</Notice>
        ) : !isReady ? (
          <Notice>The catalog needs a name and an image; then the daemon checks each change.</Notice>
        ) : checked === null ? (
          <Notice>The daemon checks it.</Notice>
        ) : "error" in checked ? (
          <Notice tone="critical">{checked.error}</Notice>
        ) : (
          <>
            <Notice tone="good">The daemon would make this catalog.</Notice>
            {checked.answer.warnings.map((w) => (
              <Notice key={w} tone="warning">
                {w}
              </Notice>
            ))}
          </>
        )}
      </div>
      <div class="acts wizard-acts">
        {before ? (
          <a
            class="button"
            href={href(["catalogs", "new"], { step: before === "image" ? undefined : before })}
          >
            Back
          </a>
        ) : null}
        {next ? (
          <a class="button primary" href={href(["catalogs", "new"], { step: next })}>
            Continue
          </a>
        ) : (
          <CreateButton isReady={!incorrect && checked !== null && "answer" in checked} />
        )}
      </div>
    </>
  );
}

function CreateButton({ isReady }: { isReady: boolean }) {
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState<string | null>(null);
  const create = async () => {
    setBusy(true);
    setError(null);
    try {
      await api.post("/v1/catalogs", { body: { name: name.value, spec: draft.value as CatalogSpec } });
      const made = name.value;
      toast(`The catalog ${made} is made.`);
      name.value = "";
      draft.value = {};
      wrong.value = {};
      refresh();
      navigate(["catalogs", made]);
    } catch (failure) {
      setError(words(failure));
      setBusy(false);
    }
  };
  return (
    <>
      <button type="button" class="primary" disabled={!isReady || busy} onClick={() => void create()}>
        {busy ? "Working" : "Create the catalog"}
      </button>
      {error ? <Notice tone="critical">{error}</Notice> : null}
    </>
  );
}

function ImageStep() {
  const images = useList<Image>("/v1/images");
  const [image, version] = (draft.value.image ?? "").split(":");
  const details = useObject<ImageDetails>(image ? `/v1/images/${encodeURIComponent(image)}` : null);
  const number = version ? Number(version) : details.data?.image.published;
  const check = useObject<ImageCheck>(
    image && number ? `/v1/images/${encodeURIComponent(image)}/versions/${number}/check` : null,
    3_600_000,
  );
  if (!images.data) return <Pending error={images.error} what="the images" />;
  if (images.data.length === 0) {
    return (
      <Panel title="Image">
        <p>A catalog needs an image, and there is none yet.</p>
        <Command
          label="Import one on the host"
          text="spillway image import debian /path/to/debian.qcow2 --format qcow2"
        />
      </Panel>
    );
  }
  return (
    <>
      <Panel title="Name and image">
        <div class="fields">
          <div class="field">
            <label for="catalog-name">Name</label>
            <input
              id="catalog-name"
              type="text"
              autocomplete="off"
              spellcheck={false}
              value={name.value}
              onInput={(e) => {
                name.value = e.currentTarget.value.trim();
              }}
            />
            <p class="hint">1 to 63 letters a to z, digits and hyphens.</p>
          </div>
          <div class="field">
            <label for="catalog-image">Image</label>
            <select
              id="catalog-image"
              value={image ?? ""}
              onChange={(e) => change("image", e.currentTarget.value)}
            >
              <option value="">choose one</option>
              {images.data.map((i) => (
                <option key={i.name} value={i.name}>
                  {i.name}
                </option>
              ))}
            </select>
          </div>
          {image ? (
            <div class="field">
              <label for="catalog-version">Version</label>
              <select
                id="catalog-version"
                value={version ?? ""}
                onChange={(e) =>
                  change("image", e.currentTarget.value ? `${image}:${e.currentTarget.value}` : image)
                }
              >
                <option value="">
                  the published one
                  {details.data?.image.published ? ` (now ${details.data.image.published})` : ""}, and follow
                  it
                </option>
                {(details.data?.versions ?? [])
                  .filter((v) => v.state === "ready")
                  .reverse()
                  .map((v) => (
                    <option key={v.version} value={String(v.version)}>
                      {v.version}, and stay at it
                    </option>
                  ))}
              </select>
            </div>
          ) : null}
        </div>
      </Panel>
      {image && number ? (
        <Panel title={`Check of ${image}:${number}`} aside="what breaks machines that are cloned from it">
          {check.data ? <Findings check={check.data} /> : <Pending error={check.error} what="the check" />}
        </Panel>
      ) : null}
    </>
  );
}

function FieldsStep({
  title,
  group,
  children,
}: {
  title: string;
  group: keyof typeof GROUPS;
  children?: ComponentChildren;
}) {
  const stores = useList<Store>("/v1/stores");
  const names = (stores.data ?? []).map((s) => s.name);
  const fields = GROUPS[group];
  const advanced = fields.filter((f) => f.isAdvanced);
  const filled = advanced.filter((f) => draft.value[f.key] !== undefined).length;
  const field = (f: (typeof fields)[number]) => (
    <SpecField key={f.key} field={f} draft={draft.value} change={change} wrong={wrong} stores={names} />
  );
  return (
    <Panel title={title}>
      {children}
      <div class="fields">{fields.filter((f) => !f.isAdvanced).map(field)}</div>
      {advanced.length ? (
        <details open={filled > 0}>
          <summary>More settings{filled ? ` (${filled} set)` : ""}</summary>
          <div class="fields">{advanced.map(field)}</div>
        </details>
      ) : null}
    </Panel>
  );
}

function MachinesStep() {
  const pattern = draft.value.naming || `${name.value || "NAME"}-###`;
  const names = machineNames(pattern, draft.value.count ?? 0);
  return (
    <FieldsStep title="Number, names and size" group="machines">
      {names.length ? (
        <p class="preview">
          Machines will be named{" "}
          {names.map((n, i) => (
            <span key={n}>
              {i === 3 && names.length === 4 && (draft.value.count ?? 0) > 4 ? "to " : ""}
              <code>{n}</code>{" "}
            </span>
          ))}
        </p>
      ) : null}
    </FieldsStep>
  );
}

function CacheStep() {
  const host = useObject<Host>("/v1/host");
  const stores = useList<Store>("/v1/stores");
  const catalogs = useList<Catalog>("/v1/catalogs");
  const [from, setFrom] = useState("");
  const machines = machineRows.value
    .filter((m) => m.catalog === from && m.levels.ram_limit_bytes > 0)
    .map((m) => m.name);
  const { sizing } = useCurves(machines.slice(0, MOST_CURVES));
  const count = draft.value.count ?? 0;
  const ram = draft.value.ram_bytes;
  const overflow = draft.value.overflow_bytes;
  const budget = host.data?.budget;
  const wanted = (ram ?? 0) * count;
  const store = stores.data?.find((s) =>
    draft.value.overflow_store ? s.name === draft.value.overflow_store : s.class === "local",
  );
  return (
    <FieldsStep title="Limits" group="cache">
      {budget ? (
        <StackedBar
          label="Budget for write caches with this catalog"
          whole={budget.ram_limit_bytes}
          segments={[
            { name: "promised now", value: budget.ram_bytes, kind: "ram-soft" },
            {
              name: ram
                ? `this catalog: ${plural(count, "machine")} of ${bytes(ram)}`
                : "this catalog: RAM tier not set",
              value: wanted,
              kind: "ram",
            },
            {
              name: "free",
              value: Math.max(0, budget.ram_limit_bytes - budget.ram_bytes - wanted),
              kind: "none",
            },
          ]}
        />
      ) : null}
      {budget && budget.ram_bytes + wanted > budget.ram_limit_bytes ? (
        <Notice tone="warning">
          All {plural(count, "machine")} together do not fit the budget of the host: those that do not fit
          will wait when they are started.
        </Notice>
      ) : null}
      {store?.space && overflow ? (
        <Notice tone={overflow * count > store.space.free_bytes ? "warning" : "note"}>
          If all overflows were full they would take {bytes(overflow * count)}; the store {store.name} has{" "}
          {bytes(store.space.free_bytes)} free.
        </Notice>
      ) : null}
      <div class="suggestion">
        <label class="choice">
          <span>Suggestion from the machines of</span>
          <select value={from} onChange={(e) => setFrom(e.currentTarget.value)}>
            <option value="">no catalog</option>
            {(catalogs.data ?? []).map((c) => (
              <option key={c.name} value={c.name}>
                {c.name}
              </option>
            ))}
          </select>
        </label>
        {from && sizing && sizing.writtenBytes > 0 ? (
          <>
            <button type="button" onClick={() => change("ram_bytes", roundUp(sizing.goalBytes))}>
              {bytes(roundUp(sizing.goalBytes))} absorbs 95%
            </button>
            <button type="button" onClick={() => change("ram_bytes", roundUp(sizing.zeroBytes))}>
              {bytes(roundUp(sizing.zeroBytes))} never overflows
            </button>
          </>
        ) : from ? (
          <span class="muted">No machine of {from} has written anything that could be counted.</span>
        ) : null}
      </div>
    </FieldsStep>
  );
}

function ReviewStep({ checked }: { checked: Checked }) {
  const set = FIELDS.filter((f) => draft.value[f.key] !== undefined);
  const [as, setAs] = useState("command");
  const body = { name: name.value, spec: draft.value };
  const text =
    as === "command"
      ? createCommand(name.value, draft.value)
      : as === "toml"
        ? toml(name.value, draft.value)
        : curl("POST", "/v1/catalogs", body);
  return (
    <>
      <Panel title="What differs from the defaults">
        <Facts
          items={[
            ["Name", name.value || "not set"],
            ["Image", draft.value.image ?? "not set"],
            ...set
              .filter((f) => f.key !== "image")
              .map((f): [string, string] => [
                f.title,
                f.key === "user_data" ? "set" : shown(f, draft.value[f.key]),
              ]),
          ]}
        />
        {checked && "answer" in checked ? (
          <p class="hint">Everything else has the daemon's default.</p>
        ) : null}
      </Panel>
      <Panel
        title="The same"
        aside={
          <label class="choice">
            <span class="sr-only">Form</span>
            <select value={as} onChange={(e) => setAs(e.currentTarget.value)}>
              <option value="command">as a command</option>
              <option value="toml">as a file for catalog apply</option>
              <option value="curl">as a request</option>
            </select>
          </label>
        }
      >
        <Command label={as === "toml" ? "catalog.toml" : "Shell"} text={text} />
      </Panel>
    </>
  );
}
