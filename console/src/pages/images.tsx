// All images of the host, and the ways to make a new one.

import { ask } from "../acts.ts";
import type { Catalog, Image, Store } from "../api/client.ts";
import { downloadImage, importFile } from "../image-imports.ts";
import { pullImage } from "../image-pulls.ts";
import { type Registry, usesOf } from "../image-words.ts";
import { href, queryValue } from "../router.ts";
import { useList } from "../state/resource.ts";
import { can } from "../state/session.ts";
import { now } from "../state/visible.ts";
import { ago, clock } from "../ui/format.ts";
import { NeedsAdmin } from "../ui/offers.tsx";
import { OperationsPanel } from "../ui/operation.tsx";
import { Filter, PageHead, Pending } from "../ui/parts.tsx";
import { type Column, Table } from "../ui/table.tsx";
import "../style/images.css";

function columns(catalogs: Catalog[] | undefined): Column<Image>[] {
  return [
    {
      key: "name",
      title: "Image",
      sort: (i) => i.name,
      cell: (i) => <a href={href(["images", i.name])}>{i.name}</a>,
    },
    {
      key: "published",
      title: "Published",
      isFigure: true,
      sort: (i) => i.published ?? 0,
      cell: (i) => i.published ?? "none",
    },
    { key: "newest", title: "Newest", isFigure: true, sort: (i) => i.newest, cell: (i) => i.newest },
    {
      key: "used",
      title: "Used by",
      cell: (i) => {
        if (!catalogs) return "";
        const next = [...usesOf(i.name, catalogs).values()].flatMap((u) => u.next);
        if (next.length === 0) return "no catalog";
        return (
          <span class="counts">
            {next.map((c) => (
              <a key={c} href={href(["catalogs", c])}>
                {c}
              </a>
            ))}
          </span>
        );
      },
    },
    {
      key: "tags",
      title: "Tags",
      isWide: true,
      cell: (i) =>
        Object.entries(i.tags)
          .map(([tag, version]) => `${tag}: ${version}`)
          .join(", ") || "-",
    },
    {
      key: "created",
      title: "First import",
      isFigure: true,
      sort: (i) => Date.parse(i.created),
      cell: (i) => (
        <time dateTime={i.created} title={clock(i.created)}>
          {ago(i.created, now.value)}
        </time>
      ),
    },
  ];
}

function NewImage() {
  const registries = useList<Registry>("/v1/registries").data;
  const stores = useList<Store>("/v1/stores").data?.map((s) => s.name);
  if (!can("admin") || !registries || !stores) return null;
  return (
    <>
      <button type="button" class="primary" onClick={() => ask(importFile(stores))}>
        Import a file
      </button>
      <button type="button" onClick={() => ask(downloadImage(stores))}>
        Download
      </button>
      {registries.length ? (
        <button type="button" onClick={() => ask(pullImage(registries, stores))}>
          Pull from a registry
        </button>
      ) : null}
    </>
  );
}

export function ImagesPage() {
  const list = useList<Image>("/v1/images");
  const catalogs = useList<Catalog>("/v1/catalogs");
  const text = (queryValue("filter") ?? "").toLowerCase();
  return (
    <>
      <PageHead
        title="Images"
        about={
          <>
            The read-only images that machines share
            <NeedsAdmin what="Making an image" />
          </>
        }
        acts={<NewImage />}
      />
      <div class="toolbar">
        <Filter label="Filter by name" />
      </div>
      {list.data ? (
        <Table
          label="Images"
          rows={list.data.filter((i) => i.name.toLowerCase().includes(text))}
          columns={columns(catalogs.data)}
          id={(i) => i.name}
          initial="name"
          empty={
            list.data.length
              ? "No image matches."
              : "There are no images yet. Import one from a file on the host."
          }
        />
      ) : (
        <Pending error={list.error} what="the images" />
      )}
      <div class="below">
        <OperationsPanel ended={0} />
      </div>
    </>
  );
}
