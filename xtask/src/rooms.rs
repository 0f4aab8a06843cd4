//! How large an owner may become: fields of a struct that has behaviour, files that give it some, lines of a function; and which
//! files of the core import each other in a circle.
//!
//! Owns the limits and the exceptions, each with its reason. Invariant: an exception that is not needed any more is a breach.

use anyhow::{Context, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use syn::spanned::Spanned;
use syn::visit::Visit;
use syn::{
    Attribute, Fields, FnArg, ImplItem, ImplItemFn, Item, ItemImpl, ReceiverKind, TraitItem, Type, UseTree,
};

/// Fields of a struct that changes itself. What only holds figures or settings has no such limit.
const MOST_FIELDS: usize = 20;
/// Files with an `impl` of the same struct.
const MOST_FILES: usize = 5;
/// Lines of a function.
const MOST_LINES: usize = 80;
/// Whose files must not import each other in a circle.
const WITHOUT_CIRCLES: &str = "crates/core/src/";

/// What is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Limit {
    Fields,
    Files,
    Lines,
}

impl Limit {
    fn most(self) -> usize {
        match self {
            Limit::Fields => MOST_FIELDS,
            Limit::Files => MOST_FILES,
            Limit::Lines => MOST_LINES,
        }
    }
}

type Exception = (Limit, &'static str, &'static str, usize);

/// What is larger than it may be: the limit, the crate, the name, and what is allowed instead.
const EXCEPTIONS: &[Exception] = &[
    // Settings; what changes them is their reading.
    (Limit::Fields, "api", "CatalogSpec", 40),
    // What a run is made of, as it is stored.
    (Limit::Fields, "host", "RunRecord", 25),
    // A list of counters: one entry after another.
    (Limit::Lines, "control", "Window::read_sums", 83),
];

/// Everything that breaks a limit, of files that are named from the root on.
pub fn breaches<'a>(root: &Path, files: impl Iterator<Item = &'a str>) -> Result<Vec<String>> {
    let mut rooms = Rooms::default();
    for file in files.filter(|file| is_product(file)) {
        let path = root.join(file);
        if path.exists() {
            let text = std::fs::read_to_string(&path).with_context(|| format!("{file}: cannot read"))?;
            let parsed = syn::parse_file(&text).with_context(|| format!("{file}: cannot parse"))?;
            rooms.add(file, &parsed.items);
        }
    }
    Ok(rooms.breaches(EXCEPTIONS))
}

fn is_product(file: &str) -> bool {
    file.contains("/src/")
        && !file.split('/').any(|part| matches!(part, "tests" | "tests.rs" | "xtask" | "fuzz"))
}

/// What was found, by crate and name.
#[derive(Default)]
struct Rooms {
    fields: BTreeMap<(String, String), (String, usize)>,
    changes_itself: BTreeSet<(String, String)>,
    impls: BTreeMap<(String, String), BTreeSet<String>>,
    long: Vec<(String, String, String, usize)>,
    /// Of the core: what each file imports.
    imports: BTreeMap<String, BTreeSet<String>>,
}

impl Rooms {
    fn add(&mut self, file: &str, items: &[Item]) {
        let of = krate(file);
        if file.starts_with(WITHOUT_CIRCLES) {
            self.imports.entry(file.to_string()).or_default().extend(imports(&module(file), items));
        }
        for item in items {
            match item {
                Item::Struct(s) => {
                    let n = if let Fields::Named(fields) = &s.fields { fields.named.len() } else { 0 };
                    // Of several of one name the largest.
                    let key = (of.clone(), s.ident.to_string());
                    let known = self.fields.entry(key).or_insert_with(|| (file.to_string(), n));
                    if n > known.1 {
                        *known = (file.to_string(), n);
                    }
                }
                Item::Impl(i) => self.add_impl(&of, file, i),
                Item::Fn(f) => self.add_function(&of, file, &f.sig.ident.to_string(), lines(f)),
                Item::Trait(t) => {
                    let functions = t.items.iter().filter_map(|item| match item {
                        TraitItem::Fn(f) => Some((format!("{}::{}", t.ident, f.sig.ident), lines(f))),
                        _ => None,
                    });
                    functions.for_each(|(name, lines)| self.add_function(&of, file, &name, lines));
                }
                Item::Mod(m) if !is_test(&m.attrs) => {
                    if let Some((_, items)) = &m.content {
                        self.add(file, items);
                    }
                }
                _ => {}
            }
        }
    }

    fn add_impl(&mut self, of: &str, file: &str, item: &ItemImpl) {
        let Some(name) = type_name(&item.self_ty) else { return };
        let key = (of.to_string(), name.clone());
        if item.trait_.is_none() {
            self.impls.entry(key.clone()).or_default().insert(file.to_string());
        }
        for item in &item.items {
            let ImplItem::Fn(f) = item else { continue };
            if changes_self(f) {
                self.changes_itself.insert(key.clone());
            }
            self.add_function(of, file, &format!("{name}::{}", f.sig.ident), lines(f));
        }
    }

    fn add_function(&mut self, of: &str, file: &str, name: &str, lines: usize) {
        if lines > MOST_LINES {
            self.long.push((of.to_string(), file.to_string(), name.to_string(), lines));
        }
    }

    fn breaches(&self, exceptions: &[Exception]) -> Vec<String> {
        let mut found = Vec::new();
        let mut used = BTreeSet::new();
        let mut check = |limit: Limit, of: &str, name: &str, n: usize, what: String| {
            let exception = exceptions.iter().find(|(l, c, s, _)| (*l, *c, *s) == (limit, of, name));
            used.extend(exception.filter(|_| n > limit.most()).map(|(l, c, s, _)| (*l, *c, *s)));
            let most = exception.map_or(limit.most(), |&(.., more)| more);
            if n > most {
                found.push(format!("{what}, {most} are the most"));
            }
        };
        for ((of, name), (file, n)) in &self.fields {
            if self.changes_itself.contains(&(of.clone(), name.clone())) {
                check(Limit::Fields, of, name, *n, format!("{file}: struct {name} has {n} fields"));
            }
        }
        for ((of, name), files) in &self.impls {
            let n = files.len();
            check(Limit::Files, of, name, n, format!("{of}: {name} has an impl in {n} files"));
        }
        for (of, file, name, n) in &self.long {
            check(Limit::Lines, of, name, *n, format!("{file}: {name} has {n} lines"));
        }
        for (limit, of, name, _) in exceptions.iter().filter(|(l, c, s, _)| !used.contains(&(*l, *c, *s))) {
            found.push(format!("xtask/src/rooms.rs: {limit:?} of {of}'s {name} need no exception any more"));
        }
        found
            .extend(self.circle().map(|circle| format!("files import in a circle: {}", circle.join(" -> "))));
        found
    }

    /// A circle of files that import each other, if there is one.
    fn circle(&self) -> Option<Vec<String>> {
        let files: BTreeMap<String, &str> =
            self.imports.keys().map(|file| (module(file), file.as_str())).collect();
        let mut edges: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        for (file, paths) in &self.imports {
            // The file that owns the longest beginning of the path; what is imported through a parent is the parent's.
            let owner = |path: &String| {
                let mut path = path.as_str();
                loop {
                    match (files.get(path), path.rsplit_once("::")) {
                        (Some(owner), _) => return Some(*owner),
                        (None, Some((front, _))) => path = front,
                        (None, None) => return None,
                    }
                }
            };
            edges.entry(file).or_default().extend(paths.iter().filter_map(owner).filter(|to| to != file));
        }
        let mut done = BTreeSet::new();
        edges.keys().find_map(|file| walk(file, &edges, &mut Vec::new(), &mut done))
    }
}

/// Follows imports from `file` on: the circle that the way there closes, if it does.
fn walk<'a>(
    file: &'a str,
    edges: &BTreeMap<&'a str, BTreeSet<&'a str>>,
    way: &mut Vec<&'a str>,
    done: &mut BTreeSet<&'a str>,
) -> Option<Vec<String>> {
    if let Some(begins) = way.iter().position(|&f| f == file) {
        return Some(way[begins..].iter().chain([&file]).map(|f| f.to_string()).collect());
    }
    if done.contains(file) {
        return None;
    }
    way.push(file);
    let found = edges.get(file).into_iter().flatten().find_map(|to| walk(to, edges, way, done));
    way.pop();
    done.insert(file);
    found
}

/// The path of a file's module within the core: `crate::a::b`.
fn module(file: &str) -> String {
    let path = file.trim_start_matches(WITHOUT_CIRCLES).trim_end_matches(".rs");
    let path = path.trim_end_matches("/mod").replace('/', "::");
    if path == "lib" { "crate".into() } else { format!("crate::{path}") }
}

/// The paths within the crate that a file's items name, from `crate` on; what its tests name is left out.
fn imports(module: &str, items: &[Item]) -> BTreeSet<String> {
    let children = items.iter().filter_map(|item| match item {
        Item::Mod(m) if m.content.is_none() => Some(m.ident.to_string()),
        _ => None,
    });
    let mut found = Imports { module, children: children.collect(), paths: BTreeSet::new() };
    items.iter().filter(|item| !matches!(item, Item::Mod(_))).for_each(|item| found.visit_item(item));
    found.paths
}

struct Imports<'a> {
    module: &'a str,
    /// Modules that the file declares.
    children: BTreeSet<String>,
    paths: BTreeSet<String>,
}

impl Imports<'_> {
    fn add(&mut self, path: &[String]) {
        let mut from = match path.first().map(String::as_str) {
            Some("crate") => "crate",
            Some("self" | "super") => self.module,
            Some(first) if self.children.contains(first) => self.module,
            _ => return,
        };
        let mut rest = path;
        while let Some((first, more)) = rest.split_first() {
            match first.as_str() {
                "crate" | "self" => {}
                "super" => from = from.rsplit_once("::").map_or(from, |(parent, _)| parent),
                _ => break,
            }
            rest = more;
        }
        let whole: Vec<&str> = std::iter::once(from).chain(rest.iter().map(String::as_str)).collect();
        self.paths.insert(whole.join("::"));
    }

    fn add_tree(&mut self, tree: &UseTree, before: &[String]) {
        let joined = |name: &syn::Ident| [before, &[name.to_string()]].concat();
        match tree {
            UseTree::Path(p) => self.add_tree(&p.tree, &joined(&p.ident)),
            UseTree::Group(g) => g.items.iter().for_each(|tree| self.add_tree(tree, before)),
            UseTree::Name(n) => self.add(&joined(&n.ident)),
            UseTree::Rename(r) => self.add(&joined(&r.ident)),
            UseTree::Glob(_) => self.add(before),
        }
    }
}

impl<'a> Visit<'a> for Imports<'_> {
    fn visit_item_use(&mut self, item: &'a syn::ItemUse) {
        self.add_tree(&item.tree, &[]);
    }

    fn visit_path(&mut self, path: &'a syn::Path) {
        if path.segments.len() > 1 {
            let segments: Vec<String> = path.segments.iter().map(|s| s.ident.to_string()).collect();
            self.add(&segments);
        }
        syn::visit::visit_path(self, path);
    }
}

fn krate(file: &str) -> String {
    let front = file.split("/src/").next().unwrap_or(file);
    front.rsplit('/').next().unwrap_or(front).to_string()
}

fn type_name(of: &Type) -> Option<String> {
    let Type::Path(path) = of else { return None };
    path.path.segments.last().map(|segment| segment.ident.to_string())
}

fn changes_self(f: &ImplItemFn) -> bool {
    let Some(FnArg::Receiver(receiver)) = f.sig.inputs.first() else { return false };
    matches!(receiver.kind, ReceiverKind::Reference(_, _, Some(_)))
}

fn lines(item: &impl Spanned) -> usize {
    let span = item.span();
    span.end().line + 1 - span.start().line
}

fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|a| {
        a.path().is_ident("cfg") && a.parse_args::<syn::Path>().is_ok_and(|path| path.is_ident("test"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(files: &[(&str, &str)], exceptions: &[Exception]) -> Vec<String> {
        let mut rooms = Rooms::default();
        for (file, text) in files {
            rooms.add(file, &syn::parse_file(text).unwrap().items);
        }
        rooms.breaches(exceptions)
    }

    #[test]
    fn an_owner_of_too_much_is_found_and_figures_are_not() {
        let fields: String = (0..=MOST_FIELDS).map(|i| format!("f{i}: u8,")).collect();
        let owner = format!("struct A {{ {fields} }} impl A {{ fn f(&mut self) {{}} }}");
        let file = "crates/x/src/a.rs";
        assert_eq!(found(&[(file, &owner)], &[]).len(), 1);
        assert!(found(&[(file, &owner)], &[(Limit::Fields, "x", "A", 30)]).is_empty());
        let figures = owner.replace("&mut self", "&self");
        assert!(found(&[(file, &figures)], &[]).is_empty());
        assert_eq!(
            found(&[(file, &figures)], &[(Limit::Fields, "x", "A", 30)]).len(),
            1,
            "no exception is needed"
        );
        let of_a_test = format!("#[cfg(test)] mod tests {{ {owner} }}");
        assert!(found(&[(file, &of_a_test)], &[]).is_empty());
    }

    #[test]
    fn a_struct_in_many_files_and_a_long_function_are_found() {
        let files: Vec<String> = (0..=MOST_FILES).map(|i| format!("crates/x/src/{i}.rs")).collect();
        let all: Vec<_> = files.iter().map(|f| (f.as_str(), "impl A { fn f() {} }")).collect();
        assert_eq!(found(&all, &[]).len(), 1);
        assert!(found(&all[1..], &[]).is_empty());
        let long = format!("fn f() {{{}}}", "\n".repeat(MOST_LINES));
        assert_eq!(found(&[("crates/x/src/a.rs", &long)], &[]).len(), 1);
    }

    #[test]
    fn a_circle_of_imports_is_found() {
        let of = |text: &'static str| ("crates/core/src/a.rs", text);
        let b = ("crates/core/src/b/mod.rs", "use crate::c::{C, D as E};");
        let c = ("crates/core/src/c.rs", "use crate::a::A;");
        let circle = found(&[of("use crate::b::B;"), b, c], &[]);
        assert!(circle[0].contains("a.rs -> crates/core/src/b/mod.rs -> crates/core/src/c.rs"), "{circle:?}");
        assert!(found(&[of("use std::io;"), b, c], &[]).is_empty());
        let inline = found(&[of("fn f() { crate::b::g::<u8>(); }"), b, c], &[]);
        assert_eq!(inline.len(), 1, "{inline:?}");
        let parent = ("crates/core/src/p.rs", "mod q; use q::Q;");
        let child = ("crates/core/src/p/q.rs", "use super::P;");
        assert_eq!(found(&[parent, child], &[]).len(), 1);
        assert!(found(&[parent, ("crates/core/src/p/q.rs", "")], &[]).is_empty());
    }
}
