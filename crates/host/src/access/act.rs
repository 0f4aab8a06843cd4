//! The action of a request, derived from its method and path: verb, object and required role. Owns that table.
//!
//! Invariant: a route that is missing from the table requires the role `admin`, and still has a verb and an object.

use super::caller::Role;
use axum::http::Method;
use serde::Serialize;

/// Longest name of an object that is kept, in characters.
const MAX_NAME_CHARACTERS: usize = 256;

/// Verb of a request that another host of the fleet is to carry out.
const PASS_ON: &str = "pass on to";

/// Action of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestAction {
    /// Verb, such as `claim`.
    pub verb: String,
    /// Object of the action.
    pub object: ActionObject,
    /// Lowest role that may do it.
    pub role: Role,
}

/// Object of an action.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct ActionObject {
    /// Kind of the object, such as `catalog`.
    pub kind: String,
    /// Name of the object, if the path contains it.
    pub name: Option<String>,
}

impl RequestAction {
    /// Whether another host of the fleet is to carry out the request.
    pub fn is_passed_on(&self) -> bool {
        self.verb == PASS_ON
    }

    /// Returns the action of a request with this method and path.
    pub fn of(method: &Method, path: &str) -> RequestAction {
        let parts: Vec<&str> = path.trim_start_matches('/').split('/').collect();
        let act = |role, verb: &str, kind: &str, name: &str| {
            let name: String = name.chars().take(MAX_NAME_CHARACTERS).collect();
            let object = ActionObject { kind: kind.into(), name: (!name.is_empty()).then_some(name) };
            RequestAction { verb: verb.chars().take(MAX_NAME_CHARACTERS).collect(), object, role }
        };
        let [_, collection, ..] = parts.as_slice() else {
            return act(Role::Admin, method.as_str(), "path", path);
        };
        let kind = match *collection {
            "registries" => "registry",
            other => other.strip_suffix('s').unwrap_or(other),
        };
        if let Some((verb, kind, name)) = of_registries(method, &parts[1..]) {
            return act(Role::Admin, &verb, kind, &name);
        }
        if let ["fleet", rest @ ..] = &parts[1..]
            && let Some((role, verb, kind, name)) = of_fleet(method, rest)
        {
            return act(role, verb, kind, name);
        }
        match (method, &parts[1..]) {
            // A WebSocket begins as a GET, and whoever has one can do what the guest's keyboard can.
            (&Method::GET | &Method::HEAD, ["machines", name, view @ ("console" | "screen")]) => {
                act(Role::Operate, &format!("open {view} of"), "machine", name)
            }
            // What a guest has is no less than what its user sees.
            (&Method::GET | &Method::HEAD, ["machines", name, "files"]) => {
                act(Role::Operate, "read a file of", "machine", name)
            }
            (&Method::GET | &Method::HEAD, [_, rest @ ..]) => act(Role::Read, "read", kind, &rest.join("/")),
            // The body says which action it is.
            (&Method::POST, ["machine-actions"]) => act(Role::Operate, "act on", "machine", ""),
            (&Method::POST, ["catalogs", name, "claims"]) => act(Role::Operate, "claim", "catalog", name),
            (&Method::POST, ["catalogs", name, "machines"]) => {
                act(Role::Admin, "add a machine to", "catalog", name)
            }
            (&Method::POST, ["machines", name, "exec"]) => {
                act(Role::Operate, "run a program in", "machine", name)
            }
            (&Method::PUT, ["machines", name, "files"]) => {
                act(Role::Operate, "write a file of", "machine", name)
            }
            (&Method::PUT, ["machines", name, "size"]) => act(Role::Admin, "resize", "machine", name),
            (&Method::PUT, ["machines", name, "claim"]) => act(Role::Operate, "renew", "machine", name),
            (&Method::DELETE, ["machines", name, "claim"]) => act(Role::Operate, "release", "machine", name),
            (&Method::POST, ["images", name, "versions"]) => act(Role::Admin, "import", "image", name),
            (&Method::POST, ["images", name, "commits"]) => act(Role::Admin, "commit", "image", name),
            (&Method::POST, ["images", name, "downloads"]) => act(Role::Admin, "import", "image", name),
            (&Method::POST, ["images", name, "pulls"]) => act(Role::Admin, "pull", "image", name),
            (&Method::POST, ["images", name, "versions", version, "pushes"]) => {
                act(Role::Admin, "push", "image", &format!("{name}:{version}"))
            }
            (&Method::PUT, ["images", name, "published"]) => act(Role::Admin, "publish", "image", name),
            (&Method::PUT, ["images", name, "tags", tag]) => {
                act(Role::Admin, &format!("tag {tag}"), "image", name)
            }
            (&Method::DELETE, ["images", name, "tags", tag]) => {
                act(Role::Admin, &format!("untag {tag}"), "image", name)
            }
            (&Method::DELETE, ["images", name, "versions", version]) => {
                act(Role::Admin, "delete", "image", &format!("{name}:{version}"))
            }
            (&Method::POST, ["images", name, "versions", version, "verify"]) => {
                act(Role::Admin, "verify", "image", &format!("{name}:{version}"))
            }
            // Who may do anything at all may stop being let in.
            (&Method::DELETE, ["session"]) => act(Role::Read, "log out", "session", ""),
            (&Method::POST, ["host"]) => act(Role::Admin, "act on", "host", ""),
            (&Method::DELETE, ["operations", id]) => act(Role::Admin, "cancel", "operation", id),
            (&Method::POST, [_]) => act(Role::Admin, "create", kind, ""),
            (&Method::PUT, [_, name]) => act(Role::Admin, "change", kind, name),
            (&Method::DELETE, [_, name]) => act(Role::Admin, "delete", kind, name),
            (_, [_, name, .., last]) => act(Role::Admin, last, kind, name),
            _ => act(Role::Admin, method.as_str(), "path", path),
        }
    }
}

/// Role, verb and object of a request about the fleet.
fn of_fleet<'a>(method: &Method, parts: &[&'a str]) -> Option<(Role, &'static str, &'static str, &'a str)> {
    use Role::{Admin, Operate, Read};
    const CATALOG: &str = "fleet catalog";
    Some(match (method, parts) {
        // The host that carries it out checks the role.
        (_, ["hosts", host, "api", _, ..]) => (Read, PASS_ON, "host", host),
        // Its body says where each host's events are to begin.
        (&Method::POST, ["event-stream"]) => (Read, "read", "fleet", "event-stream"),
        (&Method::POST, ["catalogs", name, "claims"]) => (Operate, "claim", CATALOG, name),
        // Of this host for its fleet.
        (&Method::POST, ["self", "catalogs", name, "claims"]) => {
            (Operate, "claim for the fleet", "catalog", name)
        }
        (&Method::POST, ["self", "catalogs", name, "closed-claims"]) => {
            (Operate, "close claims of the fleet", "catalog", name)
        }
        (&Method::POST, ["join-tokens"]) => (Admin, "make a join token of", "fleet", ""),
        (&Method::POST, ["hosts", host]) => (Admin, "act on", "host", host),
        (&Method::DELETE, ["hosts", host]) => (Admin, "remove from the fleet", "host", host),
        (&Method::POST, ["catalogs"]) => (Admin, "create", CATALOG, ""),
        (&Method::PUT, ["catalogs", name]) => (Admin, "change", CATALOG, name),
        (&Method::DELETE, ["catalogs", name]) => (Admin, "delete", CATALOG, name),
        (&Method::POST, ["catalogs", name, "update"]) => (Admin, "update", CATALOG, name),
        (&Method::POST, ["catalogs", name, "rollback"]) => (Admin, "roll back", CATALOG, name),
        (&Method::POST, ["catalogs", name, "rollout"]) => (Admin, "change the rollout of", CATALOG, name),
        _ => return None,
    })
}

/// Verb and object of a change of registries, and of images of a fleet, which the role `admin` may make.
fn of_registries(method: &Method, parts: &[&str]) -> Option<(String, &'static str, String)> {
    const ADD: &str = "add to the fleet";
    const REMOVE: &str = "remove from the fleet";
    let found = |verb: &str, kind, name: &str| Some((verb.to_owned(), kind, name.to_owned()));
    match (method, parts) {
        (&Method::POST, ["registries", name, "check"]) => found("check", "registry", name),
        (&Method::POST, ["registries", name, "collections"]) => found("collect garbage of", "registry", name),
        (&Method::DELETE, ["registries", name, "images", image, version]) => {
            found(&format!("delete {image}:{version} from"), "registry", name)
        }
        (&Method::POST, ["fleet", "registries"]) => found(ADD, "registry", ""),
        (&Method::POST, ["fleet", "images"]) => found(ADD, "image", ""),
        (&Method::DELETE, ["fleet", "registries", name]) => found(REMOVE, "registry", name),
        (&Method::DELETE, ["fleet", "images", name, version]) => {
            found(REMOVE, "image", &format!("{name}:{version}"))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_has_a_role_a_verb_and_an_object() {
        use Role::{Admin, Operate, Read};
        let long = format!("/v1/catalogs/{}", "é".repeat(100_000));
        for (method, path, role, verb, kind, name) in [
            (Method::GET, "/v1/images", Read, "read", "image", ""),
            (Method::GET, "/v1/machines/desk-1", Read, "read", "machine", "desk-1"),
            (Method::GET, "/v1/machines/desk-1/console", Operate, "open console of", "machine", "desk-1"),
            (Method::HEAD, "/v1/machines/desk-1/screen", Operate, "open screen of", "machine", "desk-1"),
            (Method::POST, "/v1/machines/desk-1/exec", Operate, "run a program in", "machine", "desk-1"),
            (Method::PUT, "/v1/machines/desk-1/files", Operate, "write a file of", "machine", "desk-1"),
            (Method::GET, "/v1/machines/desk-1/files", Operate, "read a file of", "machine", "desk-1"),
            (Method::HEAD, "/v1/machines/desk-1/files", Operate, "read a file of", "machine", "desk-1"),
            (Method::GET, "/v1/machines/desk-1/curve", Read, "read", "machine", "desk-1/curve"),
            (Method::GET, "/v1/machines/desk-1/latency", Read, "read", "machine", "desk-1/latency"),
            (Method::GET, "/v1/fleet/self", Read, "read", "fleet", "self"),
            (Method::POST, "/v1/fleet/event-stream", Read, "read", "fleet", "event-stream"),
            (Method::POST, "/v1/fleet", Admin, "create", "fleet", ""),
            (Method::POST, "/v1/fleet/hosts/b", Admin, "act on", "host", "b"),
            (Method::DELETE, "/v1/fleet/hosts/b", Admin, "remove from the fleet", "host", "b"),
            (Method::PUT, "/v1/fleet/catalogs/desk", Admin, "change", "fleet catalog", "desk"),
            (Method::GET, "/v1/fleet/images", Read, "read", "fleet", "images"),
            (Method::POST, "/v1/fleet/registries", Admin, "add to the fleet", "registry", ""),
            (Method::DELETE, "/v1/fleet/registries/hub", Admin, "remove from the fleet", "registry", "hub"),
            (Method::POST, "/v1/fleet/images", Admin, "add to the fleet", "image", ""),
            (Method::DELETE, "/v1/fleet/images/x/3", Admin, "remove from the fleet", "image", "x:3"),
            (Method::GET, "/v1/fleet/hosts/b/api/v1/images", Read, "pass on to", "host", "b"),
            (Method::DELETE, "/v1/fleet/hosts/b/api/v1/images/x", Read, "pass on to", "host", "b"),
            (Method::DELETE, "/v1/fleet/hosts/b/api", Admin, "api", "fleet", "hosts"),
            (Method::GET, "/anything", Admin, "GET", "path", "/anything"),
            (Method::POST, "/v1/machine-actions", Operate, "act on", "machine", ""),
            (Method::POST, "/v1/catalogs/desk/claims", Operate, "claim", "catalog", "desk"),
            (Method::POST, "/v1/fleet/catalogs/desk/claims", Operate, "claim", "fleet catalog", "desk"),
            (
                Method::POST,
                "/v1/fleet/self/catalogs/desk/claims",
                Operate,
                "claim for the fleet",
                "catalog",
                "desk",
            ),
            (
                Method::POST,
                "/v1/fleet/self/catalogs/desk/closed-claims",
                Operate,
                "close claims of the fleet",
                "catalog",
                "desk",
            ),
            (Method::PUT, "/v1/machines/desk-1/claim", Operate, "renew", "machine", "desk-1"),
            (Method::DELETE, "/v1/machines/desk-1/claim", Operate, "release", "machine", "desk-1"),
            (Method::DELETE, "/v1/machines/desk-1", Admin, "delete", "machine", "desk-1"),
            (Method::POST, "/v1/images/debian/commits", Admin, "commit", "image", "debian"),
            (Method::DELETE, "/v1/images/debian/versions/3", Admin, "delete", "image", "debian:3"),
            (Method::PUT, "/v1/images/debian/tags/gold", Admin, "tag gold", "image", "debian"),
            (Method::POST, "/v1/catalogs", Admin, "create", "catalog", ""),
            (Method::PUT, "/v1/catalogs/desk", Admin, "change", "catalog", "desk"),
            (Method::POST, "/v1/catalogs/desk/rollback", Admin, "rollback", "catalog", "desk"),
            (Method::POST, "/v1/catalogs/desk/rollout", Admin, "rollout", "catalog", "desk"),
            (Method::DELETE, "/v1/catalogs/claims", Admin, "delete", "catalog", "claims"),
            (Method::GET, "/v1/session", Read, "read", "session", ""),
            (Method::DELETE, "/v1/session", Read, "log out", "session", ""),
            (Method::PUT, "/v1/machine-actions", Admin, "PUT", "path", "/v1/machine-actions"),
            (Method::POST, "/v1/machine-actions/x", Admin, "POST", "path", "/v1/machine-actions/x"),
            (Method::OPTIONS, "/v1/images", Admin, "OPTIONS", "path", "/v1/images"),
            (Method::PUT, "", Admin, "PUT", "path", ""),
        ] {
            let act = RequestAction::of(&method, path);
            let found = (act.role, act.verb.as_str(), act.object.kind.as_str(), act.object.name.as_deref());
            assert_eq!(found, (role, verb, kind, (!name.is_empty()).then_some(name)), "{method} {path}");
        }
        assert_eq!(
            RequestAction::of(&Method::PUT, &long).object.name.unwrap().chars().count(),
            MAX_NAME_CHARACTERS
        );
    }
}
