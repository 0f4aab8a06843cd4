// Builds the console into `dist/`: the same sources always give the same bytes.
//
//   node build.mjs           writes src/api (from docs/api/openapi.json) and dist/
//   node build.mjs --check   writes nothing, and fails if src/api or dist/ are not what would be written
//   node build.mjs --test    bundles the unit tests for node
//   node build.mjs --watch   builds, and builds again when a source changes
//
// Never loads anything from the network. Invariant: names of files in dist/ do not change between builds, and no file
// contains a date or a path of the machine that built it.
import { mkdirSync, readdirSync, readFileSync, rmSync, watch, writeFileSync } from "node:fs";
import { dirname, join, relative } from "node:path";
import { fileURLToPath } from "node:url";
import { gzipSync } from "node:zlib";
import * as esbuild from "esbuild";
import openapiTS, { astToString } from "openapi-typescript";

const here = dirname(fileURLToPath(import.meta.url));
const at = (...path) => join(here, ...path);
/** Largest size of what the first page loads: index.html, app.js and app.css, with gzip. */
const BUDGET_BYTES = 80 * 1024;
/** The same of all files, with both consoles. */
const BUDGET_WITH_CONSOLES_BYTES = 260 * 1024;
/** What turns text into HTML, or a string into code. No source may contain it. */
const SINKS =
  /dangerouslySetInnerHTML|innerHTML|outerHTML|insertAdjacentHTML|document\.write|createContextualFragment|DOMParser|setAttribute\(\s*["']style|\beval\(|new Function\(|srcdoc/;

const options = {
  absWorkingDir: here,
  bundle: true,
  format: "iife",
  target: "es2022",
  minify: true,
  legalComments: "none",
  jsx: "automatic",
  jsxImportSource: "preact",
  charset: "utf8",
  logLevel: "warning",
  define: { "process.env.NODE_ENV": '"production"' },
};

/** Leaves out what of noVNC no screen here can use. */
const withoutUnused = {
  name: "without-unused",
  setup(build) {
    build.onResolve({ filter: /\/(ra2|crypto\/crypto|deflator|h264|jpeg|rre)\.js$/ }, ({ importer }) =>
      importer.endsWith("/@novnc/novnc/core/rfb.js") ? { path: at("src/consoles/unused.ts") } : undefined,
    );
  },
};

/** Gives the fleet's pages the parts of the console itself that src/shared.ts names, instead of copies. */
const withShared = {
  name: "with-shared",
  setup(build) {
    build.onResolve({ filter: /^preact\/jsx-runtime$|\/shared\.ts$/ }, () => ({
      path: "shared",
      namespace: "shared",
    }));
    build.onLoad({ filter: /.*/, namespace: "shared" }, () => ({
      contents: "module.exports = globalThis.spillwayShared",
      loader: "js",
    }));
  },
};
/** Files that the fleet's pages may contain copies of, beside their own: those without any state. */
const COPIED = /^src\/(fleet\/[\w-]+\.tsx?|ui\/format\.ts|commands\.ts|shown-host\.ts)$/;

const BUNDLES = [
  { entryPoints: { app: "src/main.tsx" } },
  // Charts are most of the code, and few pages have one: their own file, which is loaded when it is needed.
  { entryPoints: { chart: "src/chart.ts" }, format: "esm" },
  // The pages of a fleet, which few hosts are in.
  { entryPoints: { fleet: "src/fleet/main.tsx" }, format: "esm", plugins: [withShared] },
  // The pages of consoles are documents of their own, and load their libraries alone. noVNC needs modules: it awaits.
  {
    entryPoints: { serial: "src/consoles/serial.ts", screen: "src/consoles/screen.ts" },
    format: "esm",
    plugins: [withoutUnused],
    // They draw without Preact: signals alone, which that package is made of.
    alias: { "@preact/signals": "@preact/signals-core" },
  },
  // What a page of Cockpit has more.
  { entryPoints: { "cockpit/cockpit": "src/cockpit/main.ts" } },
];

/** Scripts of pages in Cockpit, before those of the console: Cockpit's library, what it knows of packages, and the way to the daemon. */
const COCKPIT_SCRIPTS = ["../base1/cockpit.js", "../manifests.js", "cockpit.js"]
  .map((path) => `<script src="${path}"></script>\n`)
  .join("");

/** What a form has room for of a description: what the setting is, and what it is when it is left out. */
function hint(description) {
  const sentences = description.split(/(?<=[.:])\s(?=[A-Z])/);
  return sentences.filter((text, i) => i === 0 || /^(By default|Without)/.test(text)).join(" ");
}

const description = () => JSON.parse(readFileSync(at("../docs/api/openapi.json"), "utf8"));

/** Settings of catalogs, by name. */
function settings(document) {
  const spec = document.components.schemas.CatalogSpec;
  return Object.entries(spec.properties).filter(([name]) => name !== "redacted");
}

/** What each setting is, for forms. */
function hints() {
  const text = (schema) =>
    schema.description ?? (schema.oneOf ?? []).map((s) => s.description).find(Boolean) ?? "";
  return Object.fromEntries(settings(description()).map(([name, schema]) => [name, hint(text(schema))]));
}

/** Files that are generated from the API's description. */
async function generated() {
  const document = description();
  const types = astToString(await openapiTS(document, { alphabetize: false, defaultNonNullable: false }));
  const header = "// Generated by build.mjs from docs/api/openapi.json. Do not edit.\n";
  const fields = {};
  const spec = document.components.schemas.CatalogSpec;
  for (const [name, schema] of settings(document)) {
    const effect = spec["x-spillway-effects"][name];
    if (!effect) throw new Error(`the API does not say when a change of ${name} takes effect`);
    // Most settings take effect at the next start (aboutOf): what is not written is not loaded.
    const field = effect === "at the next start" ? {} : { effect };
    for (const bound of ["minimum", "maximum", "multipleOf"])
      if (bound in schema) field[bound] = schema[bound];
    fields[name] = field;
  }
  return {
    "src/api/schema.d.ts": header + types,
    "src/api/spec-fields.json": `${JSON.stringify(fields, null, 1)}\n`,
  };
}

/** Licence texts of the packages that the bundle contains. */
function licences(inputs) {
  const names = new Set();
  for (const path of Object.keys(inputs)) {
    const match = path.match(/node_modules\/((?:@[^/]+\/)?[^/]+)\//);
    if (match) names.add(match[1]);
  }
  const texts = [...names].sort().map((name) => {
    const about = JSON.parse(readFileSync(at("node_modules", name, "package.json"), "utf8"));
    const file = readdirSync(at("node_modules", name)).find((f) => /^licen[cs]e/i.test(f));
    const text = file
      ? readFileSync(at("node_modules", name, file), "utf8").trim()
      : `Licence: ${about.license}`;
    return `${name} ${about.version} (${about.license})\n\n${text}\n`;
  });
  return `The console contains these packages.\n\n${texts.join(`\n${"-".repeat(78)}\n\n`)}`;
}

/** The files of dist/, by name. */
async function built() {
  const files = {};
  const inputs = {};
  for (const bundle of BUNDLES) {
    const result = await esbuild.build({
      ...options,
      ...bundle,
      outdir: "dist",
      write: false,
      metafile: true,
    });
    for (const file of result.outputFiles)
      files[relative(at("dist"), file.path)] = Buffer.from(file.contents);
    Object.assign(inputs, result.metafile.inputs);
    if (bundle.entryPoints.fleet) checkCopies(Object.keys(result.metafile.inputs));
  }
  files["index.html"] = readFileSync(at("src/index.html"));
  for (const name of ["serial.html", "screen.html"]) files[name] = readFileSync(at("src/consoles", name));
  // Files of this folder and then those of dist/cockpit are Cockpit's package.
  for (const name of ["index.html", "serial.html", "screen.html"])
    files[`cockpit/${name}`] = Buffer.from(
      String(files[name]).replace("<script", `${COCKPIT_SCRIPTS}<script`),
    );
  files["cockpit/manifest.json"] = readFileSync(at("src/cockpit/manifest.json"));
  files["hints.json"] = Buffer.from(JSON.stringify(hints()));
  files["licences.txt"] = Buffer.from(licences(inputs));
  return files;
}

/** A second copy of what has a state would be another state. */
function checkCopies(inputs) {
  const bad = inputs.filter((path) => !COPIED.test(path) && path !== "shared:shared");
  if (bad.length) throw new Error(`the fleet's pages must have these from src/shared.ts: ${bad.join(", ")}`);
}

function checkSinks(folder) {
  const bad = [];
  for (const entry of readdirSync(at(folder), { recursive: true })) {
    if (!/\.(ts|tsx|html)$/.test(entry) || entry.endsWith("schema.d.ts")) continue;
    readFileSync(at(folder, entry), "utf8")
      .split("\n")
      .forEach((line, i) => {
        if (SINKS.test(line)) bad.push(`${folder}/${entry}:${i + 1}: ${line.trim()}`);
      });
  }
  if (bad.length) throw new Error(`these lines could turn text into HTML or code:\n${bad.join("\n")}`);
}

async function write() {
  mkdirSync(at("src/api"), { recursive: true });
  for (const [path, text] of Object.entries(await generated())) writeFileSync(at(path), text);
  checkSinks("src");
  const files = await built();
  mkdirSync(at("dist/cockpit"), { recursive: true });
  for (const [name, bytes] of Object.entries(files)) writeFileSync(at("dist", name), bytes);
  report(files);
}

function report(files) {
  const size = (name) => gzipSync(files[name], { level: 9 }).length;
  for (const name of Object.keys(files).sort()) {
    console.log(
      `${name.padEnd(22)}${String(files[name].length).padStart(9)} bytes${String(size(name)).padStart(9)} gzip`,
    );
  }
  const first = ["index.html", "app.js", "app.css"].reduce((sum, name) => sum + size(name), 0);
  // No page loads the licences, and those of Cockpit come from its own server.
  const isCounted = (name) => name !== "licences.txt" && !name.startsWith("cockpit/");
  const all = Object.keys(files)
    .filter(isCounted)
    .reduce((sum, name) => sum + size(name), 0);
  console.log(
    `${"with consoles".padEnd(22)}${String(all).padStart(30)} gzip of ${BUDGET_WITH_CONSOLES_BYTES}`,
  );
  if (all > BUDGET_WITH_CONSOLES_BYTES) {
    throw new Error(`all files have ${all} bytes with gzip; allowed are ${BUDGET_WITH_CONSOLES_BYTES}`);
  }
  console.log(`${"first page".padEnd(22)}${String(first).padStart(30)} gzip of ${BUDGET_BYTES}`);
  if (first > BUDGET_BYTES)
    throw new Error(`the first page has ${first} bytes with gzip; allowed are ${BUDGET_BYTES}`);
}

async function check() {
  const stale = [];
  const compare = (path, bytes) => {
    let there;
    try {
      there = readFileSync(at(path));
    } catch {
      there = null;
    }
    if (!there?.equals(Buffer.from(bytes))) stale.push(`console/${path}`);
  };
  for (const [path, text] of Object.entries(await generated())) compare(path, text);
  checkSinks("src");
  const files = await built();
  for (const [name, bytes] of Object.entries(files)) compare(`dist/${name}`, bytes);
  report(files);
  if (stale.length) throw new Error(`not current, run 'npm run build' in console/: ${stale.join(", ")}`);
}

async function tests() {
  rmSync(at(".test-build"), { recursive: true, force: true });
  const entryPoints = readdirSync(at("test"))
    .filter((name) => name.endsWith(".test.ts"))
    .map((name) => `test/${name}`);
  await esbuild.build({
    ...options,
    entryPoints,
    outdir: ".test-build",
    format: "esm",
    platform: "node",
    minify: false,
    sourcemap: "inline",
  });
}

try {
  if (process.argv.includes("--check")) await check();
  else if (process.argv.includes("--test")) await tests();
  else await write();
  if (process.argv.includes("--watch")) {
    let timer;
    watch(at("src"), { recursive: true }, () => {
      clearTimeout(timer);
      timer = setTimeout(() => write().catch((e) => console.error(e.message)), 100);
    });
  }
} catch (error) {
  console.error(error.message);
  process.exitCode = 1;
}
