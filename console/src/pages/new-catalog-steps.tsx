// The steps of the wizard in which something is filled in.
import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import {
  type Catalog,
  type Host,
  type Image,
  type ImageCheck,
  type ImageDetails,
  type Store,
  words,
} from "../api/client.ts";
import { machineNames } from "../commands.ts";
import { href } from "../router.ts";
import { changeDraft, type Draft, draft, name, wrong } from "../state/edits.ts";
import { machineRows } from "../state/figures.ts";
import { useList, useObject } from "../state/resource.ts";
import { Findings } from "../ui/findings.tsx";
import { bytes, plural } from "../ui/format.ts";
import { Command, Notice, Panel, Pending } from "../ui/parts.tsx";
import { StackedBar } from "../ui/planes.tsx";
import { roundUp, useCatalogCurve } from "../ui/sizing.tsx";
import { GROUPS, SpecField } from "../ui/spec-form.tsx";

export function ImageStep() {
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
        <p>
          A catalog needs an image, and there is none yet: import or download one on the page{" "}
          <a href={href(["images"])}>Images</a>. The draft stays.
        </p>
        <Command
          label="Or import one on the host"
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
              onChange={(e) => changeDraft("image", e.currentTarget.value)}
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
                  changeDraft("image", e.currentTarget.value ? `${image}:${e.currentTarget.value}` : image)
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

export function FieldsStep({
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
    <SpecField key={f.key} field={f} draft={draft.value} change={changeDraft} wrong={wrong} stores={names} />
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

export function MachinesStep() {
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

/** What a new catalog needs if all of its machines run and their overflow is full; null: a limit is not known. */
export function needs(spec: Draft): { count: number; ram: number; overflow: number } | null {
  // In modes without a tier, its limit is null.
  if (spec.ram_bytes === undefined || spec.overflow_bytes === undefined) return null;
  const count = spec.count ?? 0;
  return { count, ram: (spec.ram_bytes ?? 0) * count, overflow: (spec.overflow_bytes ?? 0) * count };
}

function Needs({ spec }: { spec: Draft }) {
  const host = useObject<Host>("/v1/host");
  const stores = useList<Store>("/v1/stores");
  const sum = needs(spec);
  const budget = host.data?.budget;
  if (!spec || !sum || !budget)
    return (
      <p class="muted">What it needs of the host is shown as soon as the daemon has checked the draft.</p>
    );
  const store = stores.data?.find((s) =>
    spec.overflow_store ? s.name === spec.overflow_store : s.class === "local",
  );
  const machines = plural(sum.count, "machine");
  return (
    <>
      <StackedBar
        label="Budget for write caches with this catalog"
        whole={budget.ram_limit_bytes}
        segments={[
          { name: "machines that are on", value: budget.ram_bytes, kind: "ram-soft" },
          {
            name: spec.ram_bytes
              ? `this catalog: ${machines} of ${bytes(spec.ram_bytes)}`
              : "this catalog: no RAM tier",
            value: sum.ram,
            kind: "ram",
          },
          {
            name: "free",
            value: Math.max(0, budget.ram_limit_bytes - budget.ram_bytes - sum.ram),
            kind: "none",
          },
        ]}
      />
      {budget.ram_bytes + sum.ram > budget.ram_limit_bytes ? (
        <Notice tone="warning">
          All {machines} together do not fit the budget of the host: those that do not fit will wait when they
          are started.
        </Notice>
      ) : null}
      {store?.space && sum.overflow ? (
        <Notice tone={sum.overflow > store.space.free_bytes ? "warning" : "note"}>
          If all overflows were full they would take {bytes(sum.overflow)}: {machines} of{" "}
          {bytes(spec.overflow_bytes ?? 0)}. The store {store.name} has {bytes(store.space.free_bytes)} free.
        </Notice>
      ) : null}
    </>
  );
}

function Suggestion() {
  const catalogs = useList<Catalog>("/v1/catalogs");
  const [from, setFrom] = useState("");
  return (
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
      <div class="acts" aria-live="polite">
        {from ? <SuggestedLimits from={from} /> : null}
      </div>
    </div>
  );
}

function SuggestedLimits({ from }: { from: string }) {
  const isCounted = machineRows.value.some((m) => m.catalog === from && m.levels.ram_limit_bytes > 0);
  const { sizing, error } = useCatalogCurve(isCounted ? from : null);
  if (!isCounted)
    return <span class="muted">No machine of {from} with a RAM tier runs, so there is no curve.</span>;
  if (!sizing)
    return (
      <span class="muted">
        {error ? `The curve cannot be read: ${words(error)}` : `Reading the curve of ${from}`}
      </span>
    );
  if (sizing.writtenBytes === 0)
    return <span class="muted">No machine of {from} has written anything that could be counted.</span>;
  const choice = (limit: number, what: string) => (
    <button type="button" onClick={() => changeDraft("ram_bytes", roundUp(limit))}>
      {bytes(roundUp(limit))}: {what}
    </button>
  );
  return (
    <>
      {choice(sizing.goalBytes, "95% would have been absorbed")}
      {choice(sizing.zeroBytes, "nothing would have overflowed")}
    </>
  );
}

export function CacheStep({ defaults }: { defaults: Draft }) {
  return (
    <FieldsStep title="Limits" group="cache">
      <Needs spec={{ ...defaults, ...draft.value }} />
      <Suggestion />
    </FieldsStep>
  );
}
