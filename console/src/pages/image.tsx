// One image: its versions, which one is published, and what the check says of each.
import { useState } from "preact/hooks";
import { ask } from "../acts.ts";
import { ApiError, api, type ImageCheck, type ImageDetails, type Schemas } from "../api/client.ts";
import { line } from "../commands.ts";
import { queryValue, setQuery } from "../router.ts";
import { useObject } from "../state/resource.ts";
import { can } from "../state/session.ts";
import { now } from "../state/visible.ts";
import { Findings } from "../ui/findings.tsx";
import { ago, bytes, clock, percent } from "../ui/format.ts";
import { Badge, Notice, PageHead, Panel, Pending } from "../ui/parts.tsx";
import { type Column, Table } from "../ui/table.tsx";

type Version = Schemas["ImageVersion"];

export function originText(origin: Schemas["Origin"]): string {
  if (origin.kind === "import") return origin.path;
  if (origin.kind === "registry") return `${origin.registry}, ${origin.image}`;
  return `${origin.machine}, over ${origin.from}`;
}

export function ImagePage({ name }: { name: string }) {
  const loaded = useObject<ImageDetails>(`/v1/images/${encodeURIComponent(name)}`);
  const [chosen] = useState(() => queryValue("check"));
  const details = loaded.data;
  const crumbs = [{ text: "Images", to: ["images"] }];
  if (!details) {
    return (
      <>
        <PageHead title={name} crumbs={crumbs} />
        {loaded.error instanceof ApiError && loaded.error.code === "not_found" ? (
          <Notice>There is no image {name}.</Notice>
        ) : (
          <Pending error={loaded.error} what="the image" />
        )}
      </>
    );
  }
  const { image, versions } = details;
  const checked = Number(queryValue("check") ?? chosen ?? image.published ?? versions.at(-1)?.version ?? 0);
  const publish = (v: Version) =>
    ask({
      title: `Publish ${name}:${v.version}?`,
      consequences: [
        "Catalogs that follow the image take this version at the next start of each machine.",
        "Machines that run are not restarted.",
      ],
      verb: "Publish",
      command: line("spillway", "image", "publish", `${name}:${v.version}`),
      run: () =>
        api.put("/v1/images/{name}/published", {
          path: { name },
          ifMatch: loaded.etag ?? undefined,
          body: { version: v.version },
        }),
      done: `${name}:${v.version} is published.`,
    });
  const remove = (v: Version) =>
    ask({
      title: `Delete ${name}:${v.version}?`,
      consequences: [
        "The content of the version is gone.",
        "The daemon refuses this while a catalog or a disk uses it.",
      ],
      verb: "Delete",
      isDestructive: true,
      typed: `${name}:${v.version}`,
      command: line("spillway", "image", "delete", `${name}:${v.version}`),
      run: () =>
        api.delete("/v1/images/{name}/versions/{version}", {
          path: { name, version: v.version },
          ifMatch: loaded.etag ?? undefined,
        }),
      done: `${name}:${v.version} is deleted.`,
    });
  const columns: Column<Version>[] = [
    {
      key: "version",
      title: "Version",
      sort: (v) => -v.version,
      cell: (v) => (
        <span class="counts">
          {v.version}
          {image.published === v.version ? <Badge tone="good">published</Badge> : null}
          {v.state === "ready" ? null : <Badge tone="note">{v.state}</Badge>}
          {Object.entries(image.tags)
            .filter(([, n]) => n === v.version)
            .map(([tag]) => (
              <Badge key={tag}>{tag}</Badge>
            ))}
        </span>
      ),
    },
    {
      key: "size",
      title: "Disk",
      isFigure: true,
      sort: (v) => v.size_bytes,
      cell: (v) => bytes(v.size_bytes),
    },
    {
      key: "stored",
      title: "Stored",
      isFigure: true,
      sort: (v) => v.stored_bytes,
      cell: (v) => bytes(v.stored_bytes),
    },
    {
      key: "cached",
      title: "On the host",
      isFigure: true,
      isWide: true,
      cell: (v) => {
        const c = details.cached?.find((o) => o.version === v.version);
        return c ? `${percent(c.present_chunks / Math.max(1, c.chunks), 0)} of its chunks` : "whole";
      },
    },
    {
      key: "created",
      title: "Made",
      isFigure: true,
      sort: (v) => Date.parse(v.created),
      cell: (v) => (
        <time dateTime={v.created} title={clock(v.created)}>
          {ago(v.created, now.value)}
        </time>
      ),
    },
    {
      key: "origin",
      title: "From",
      isWide: true,
      cell: (v) => <code class="clip">{originText(v.origin)}</code>,
    },
    {
      key: "acts",
      title: "Acts",
      cell: (v) => (
        <span class="acts">
          <button
            type="button"
            aria-pressed={v.version === checked}
            onClick={() => setQuery({ check: String(v.version) })}
          >
            Check
          </button>
          <button
            type="button"
            disabled={!can("admin") || v.state !== "ready" || image.published === v.version}
            onClick={() => publish(v)}
          >
            Publish
          </button>
          <button type="button" class="danger-plain" disabled={!can("admin")} onClick={() => remove(v)}>
            Delete
          </button>
        </span>
      ),
    },
  ];
  return (
    <>
      <PageHead
        title={name}
        crumbs={crumbs}
        about={image.published ? `Version ${image.published} is published` : "No version is published"}
      />
      <Table
        label={`Versions of ${name}`}
        rows={versions}
        columns={columns}
        id={(v) => String(v.version)}
        initial="version"
        empty="The image has no versions."
      />
      {versions
        .find((v) => v.version === checked)
        ?.notes?.map((n) => (
          <Notice key={n}>{n}</Notice>
        ))}
      {checked ? <CheckPanel name={name} version={checked} /> : null}
    </>
  );
}

function CheckPanel({ name, version }: { name: string; version: number }) {
  const check = useObject<ImageCheck>(
    `/v1/images/${encodeURIComponent(name)}/versions/${version}/check`,
    3_600_000,
  );
  return (
    <Panel title={`Check of ${name}:${version}`} aside="what breaks machines that are cloned from it">
      {check.data ? <Findings check={check.data} /> : <Pending error={check.error} what="the check" />}
    </Panel>
  );
}
