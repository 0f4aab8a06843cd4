//! The OpenAPI document: descriptions of the routes, completed with the bounds of every integer, descriptions of
//! responses, names and groups of operations, the effect of each setting of a catalog, and the security schemes. Owns no
//! route.
//!
//! Invariant: an integer of a request has the bounds by which it is checked; an integer that only responses contain has
//! those of its type.

use serde_json::{Map, Value};
use spillway_api::CatalogSpec;
use spillway_api::bounds::{self, Bounds};
use std::collections::{BTreeSet, VecDeque};
use utoipa::openapi::path::Operation;
use utoipa::openapi::schema::{
    AdditionalProperties, ArrayItems, KnownFormat, SchemaFormat, SchemaType, Type,
};
use utoipa::openapi::security::{ApiKey, ApiKeyValue, HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa::openapi::{Object, OpenApi, RefOr, Schema};
use utoipa::{Modify, Number};

/// Adds the security schemes.
pub struct Security;

impl Modify for Security {
    fn modify(&self, api: &mut OpenApi) {
        let words = "Over TCP, which is TLS always, each request carries a token: `Authorization: Bearer TOKEN`. Its role is \
                     `read`, `operate` or `admin`. On the unix socket no token is needed: the kernel says which user connects \
                     (SO_PEERCRED), the rights of the socket decide who may, and all of them have the role `admin`.";
        let scheme = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).description(Some(words)).build();
        let components = api.components.get_or_insert_default();
        components.add_security_scheme("bearerToken", SecurityScheme::Http(scheme));
        let words =
            "A browser's session, opened with a token by `POST /v1/session`. It has the role of the token.";
        let cookie = ApiKey::Cookie(ApiKeyValue::with_description("__Host-spillway", words));
        components.add_security_scheme("sessionCookie", SecurityScheme::ApiKey(cookie));
    }
}

/// Adds the bounds, and the descriptions and names of operations.
pub fn complete(api: &mut OpenApi) {
    for schema in api.components.iter_mut().flat_map(|components| components.schemas.values_mut()) {
        join(schema);
    }
    let asked = asked(api);
    if let Some(components) = &mut api.components {
        components.schemas.get_mut("CatalogSpec").into_iter().for_each(add_effects);
        for (name, schema) in &mut components.schemas {
            let is_asked = asked.contains(name);
            walk(schema, None, &mut |object, property| match property
                .and_then(|property| bounds::of_field(name, property))
            {
                Some(bounds) => set(object, bounds),
                None if !is_asked => set_by_type(object),
                None => {}
            });
        }
    }
    name_wildcards(api);
    for (path, item) in &mut api.paths.paths {
        let operations = [&mut item.get, &mut item.put, &mut item.post, &mut item.delete];
        for operation in operations.into_iter().flatten() {
            for parameter in operation.parameters.iter_mut().flatten() {
                let bounds = bounds::of_parameter(&parameter.name);
                if let (Some(schema), Some(bounds)) = (&mut parameter.schema, bounds) {
                    walk(schema, None, &mut |object, _| set(object, bounds));
                }
            }
            describe(operation);
            operation.tags = Some(vec![tag(path).into()]);
            operation.operation_id = operation.operation_id.as_deref().map(camel_case);
        }
    }
}

/// Writes the rest of a path as OpenAPI writes parameters: `{path}`, which routes call `{*path}`.
fn name_wildcards(api: &mut OpenApi) {
    let paths = std::mem::take(&mut api.paths.paths);
    api.paths.paths = paths.into_iter().map(|(path, item)| (path.replace("{*", "{"), item)).collect();
}

/// Adds when a change of each setting of a catalog takes effect, for clients that show settings.
fn add_effects(schema: &mut RefOr<Schema>) {
    let RefOr::T(Schema::Object(spec)) = schema else { return };
    let effect = |setting: &str| match setting {
        _ if CatalogSpec::is_live(setting) => "at once",
        _ if CatalogSpec::is_fixed(setting) => "cannot be changed",
        _ => "at the next start",
    };
    // `redacted` is no setting.
    let settings = spec.properties.keys().filter(|name| *name != "redacted");
    let effects: Map<String, Value> =
        settings.map(|setting| (setting.clone(), effect(setting).into())).collect();
    spec.extensions.get_or_insert_default().insert("x-spillway-effects".into(), effects.into());
}

/// Group of a path.
fn tag(path: &str) -> &str {
    let collection = path.split('/').nth(2).unwrap_or(path);
    match collection {
        _ if path.ends_with("/claims") || path.ends_with("/claim") => "claims",
        "event-stream" => "events",
        "machine-actions" => "machines",
        "metrics" => "figures",
        named => named,
    }
}

/// Converts `create_catalog` to `createCatalog`.
fn camel_case(function: &str) -> String {
    let capital = |word: &str| word[..1].to_ascii_uppercase() + &word[1..];
    let words = function.split('_').enumerate();
    words.map(|(n, word)| if n == 0 { word.to_owned() } else { capital(word) }).collect()
}

/// An object that is made of parts, which may be made of parts, becomes one with the properties of all: each part alone would refuse
/// those of the others.
fn join(schema: &mut RefOr<Schema>) {
    let RefOr::T(Schema::AllOf(parts)) = schema else { return };
    let mut whole = Object::new();
    whole.description = parts.description.clone();
    for part in &parts.items {
        let mut part = match part {
            RefOr::T(Schema::OneOf(choice)) if choice.items.len() == 1 => choice.items[0].clone(),
            part => part.clone(),
        };
        join(&mut part);
        let RefOr::T(Schema::Object(part)) = part else { return };
        whole.properties.extend(part.properties);
        whole.required.extend(part.required);
    }
    // As of each type of a request.
    whole.additional_properties = Some(Box::new(AdditionalProperties::FreeForm(false)));
    *schema = RefOr::T(Schema::Object(whole));
}

/// Adds a description of the body to each response without one.
fn describe(operation: &mut Operation) {
    for response in operation.responses.responses.values_mut() {
        let RefOr::T(response) = response else { continue };
        if !response.description.is_empty() {
            continue;
        }
        let mut found = VecDeque::new();
        let schemas = response.content.values().filter_map(|content| content.schema.as_ref());
        schemas.for_each(|schema| names(schema, &mut found));
        response.description = match found.pop_front() {
            Some(name) => format!("The request succeeded; the body is a `{name}`."),
            None => "The request succeeded; the media type says what the body is.".into(),
        };
    }
}

/// Names of the schemas that request bodies consist of.
fn asked(api: &OpenApi) -> BTreeSet<String> {
    let mut left = VecDeque::new();
    for item in api.paths.paths.values() {
        let operations = [&item.put, &item.post, &item.delete].into_iter().flatten();
        let bodies = operations.filter_map(|operation| operation.request_body.as_ref());
        for content in bodies.flat_map(|body| body.content.values()) {
            content.schema.iter().for_each(|schema| names(schema, &mut left));
        }
    }
    let mut found = BTreeSet::new();
    while let Some(name) = left.pop_front() {
        let schema = api.components.as_ref().and_then(|components| components.schemas.get(&name));
        if found.insert(name) {
            schema.into_iter().for_each(|schema| names(schema, &mut left));
        }
    }
    found
}

/// Collects the schemas that this one refers to.
fn names(schema: &RefOr<Schema>, found: &mut VecDeque<String>) {
    match schema {
        RefOr::Ref(to) => found.extend(to.ref_location.rsplit('/').next().map(str::to_owned)),
        RefOr::T(Schema::Array(array)) => {
            if let ArrayItems::RefOrSchema(items) = &array.items {
                names(items, found);
            }
        }
        RefOr::T(Schema::Object(object)) => {
            object.properties.values().for_each(|property| names(property, found));
            if let Some(AdditionalProperties::RefOr(more)) = object.additional_properties.as_deref() {
                names(more, found);
            }
        }
        RefOr::T(Schema::OneOf(choice)) => choice.items.iter().for_each(|item| names(item, found)),
        RefOr::T(Schema::AllOf(parts)) => parts.items.iter().for_each(|item| names(item, found)),
        RefOr::T(Schema::AnyOf(choice)) => choice.items.iter().for_each(|item| names(item, found)),
        RefOr::T(_) => {}
    }
}

/// Calls `see` with every number below a schema, and the property that it belongs to.
fn walk(schema: &mut RefOr<Schema>, property: Option<&str>, see: &mut dyn FnMut(&mut Object, Option<&str>)) {
    match schema {
        RefOr::T(Schema::Object(object)) => {
            if is_number(object) {
                see(object, property);
            }
            for (name, inner) in &mut object.properties {
                walk(inner, Some(name), see);
            }
            if let Some(AdditionalProperties::RefOr(more)) = object.additional_properties.as_deref_mut() {
                walk(more, property, see);
            }
        }
        RefOr::T(Schema::Array(array)) => {
            if let ArrayItems::RefOrSchema(items) = &mut array.items {
                walk(items, property, see);
            }
        }
        RefOr::T(Schema::OneOf(choice)) => choice.items.iter_mut().for_each(|item| walk(item, property, see)),
        RefOr::T(Schema::AllOf(parts)) => parts.items.iter_mut().for_each(|item| walk(item, property, see)),
        RefOr::T(Schema::AnyOf(choice)) => choice.items.iter_mut().for_each(|item| walk(item, property, see)),
        RefOr::T(_) | RefOr::Ref(_) => {}
    }
}

fn is_number(object: &Object) -> bool {
    let is_number = |t: &Type| matches!(t, Type::Integer | Type::Number);
    match &object.schema_type {
        SchemaType::Type(one) => is_number(one),
        SchemaType::Array(many) => many.iter().any(is_number),
        SchemaType::AnyValue => false,
    }
}

fn set(object: &mut Object, bounds: &Bounds) {
    object.minimum = Some(Number::UInt(bounds.least as usize));
    object.maximum = Some(Number::UInt(bounds.most as usize));
    object.multiple_of = (bounds.step > 1).then_some(Number::UInt(bounds.step as usize));
}

/// Sets bounds by type for integers of responses; for 64-bit counts, the largest integer that JSON clients can read.
fn set_by_type(object: &mut Object) {
    let most = match object.format {
        Some(SchemaFormat::KnownFormat(KnownFormat::Int32)) => u64::from(u32::MAX),
        Some(SchemaFormat::KnownFormat(KnownFormat::Int64)) => i64::MAX as u64,
        _ => return,
    };
    object.minimum.get_or_insert(Number::UInt(0));
    object.maximum.get_or_insert(Number::UInt(most as usize));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Paths to all integers that lack a bound.
    fn unbounded(at: &str, value: &Value, found: &mut Vec<String>) {
        match value {
            Value::Object(fields) => {
                let is_integer = match &fields.get("type") {
                    Some(Value::String(one)) => one == "integer",
                    Some(Value::Array(many)) => many.iter().any(|one| one == "integer"),
                    _ => false,
                };
                let has = |word| fields.get(word).is_some_and(Value::is_u64);
                if is_integer && !(has("minimum") && has("maximum")) {
                    found.push(at.to_owned());
                }
                fields.iter().for_each(|(name, inner)| unbounded(&format!("{at}/{name}"), inner, found));
            }
            Value::Array(items) => {
                items.iter().enumerate().for_each(|(n, inner)| unbounded(&format!("{at}/{n}"), inner, found));
            }
            _ => {}
        }
    }

    #[test]
    fn an_operation_is_a_verb_and_a_noun_and_has_a_tag_that_is_described() {
        let document: Value = serde_json::from_str(&super::super::document()).unwrap();
        let tags: Vec<&Value> = document["tags"].as_array().unwrap().iter().map(|tag| &tag["name"]).collect();
        let verbs = [
            "cancel", "change", "check", "claim", "close", "collect", "commit", "create", "delete",
            "download", "get", "import", "list", "open", "publish", "pull", "push", "release", "remove",
            "renew", "replace", "roll", "run", "stream", "tag", "untag", "update", "verify",
        ];
        let operations =
            document["paths"].as_object().unwrap().values().flat_map(|path| path.as_object().unwrap());
        let mut ids = Vec::new();
        for (_, operation) in operations {
            let id = operation["operationId"].as_str().unwrap();
            let verb = id.split(char::is_uppercase).next().unwrap();
            assert!(verbs.contains(&verb) && verb.len() < id.len() && !id.contains('_'), "{id}");
            assert!(tags.contains(&&operation["tags"][0]), "{id}: {}", operation["tags"]);
            ids.push(id);
        }
        assert!(["createCatalog", "listMachines"].iter().all(|id| ids.contains(id)), "{ids:?}");
        let count = ids.len();
        ids.sort();
        ids.dedup();
        assert_eq!(ids.len(), count, "no two operations have one id");
        assert_eq!(
            document["security"],
            serde_json::json!([{}, { "bearerToken": [] }, { "sessionCookie": [] }])
        );
        assert_eq!(document["components"]["securitySchemes"]["bearerToken"]["scheme"], "bearer");
    }

    #[test]
    fn each_setting_of_a_catalog_says_when_it_takes_effect() {
        let document: Value = serde_json::from_str(&super::super::document()).unwrap();
        let spec = &document["components"]["schemas"]["CatalogSpec"];
        let effects = spec["x-spillway-effects"].as_object().unwrap();
        let settings = spec["properties"].as_object().unwrap().keys().filter(|name| *name != "redacted");
        assert!(effects.keys().eq(settings));
        for (setting, effect) in
            [("ram_bytes", "at once"), ("mode", "at the next start"), ("naming", "cannot be changed")]
        {
            assert_eq!(effects[setting], effect);
        }
        let live = effects.iter().filter(|(_, effect)| *effect == "at once").map(|(setting, _)| setting);
        assert!(live.clone().all(|setting| CatalogSpec::is_live(setting)) && live.count() == 16);
    }

    /// Nothing could be made of parts that each refuse what the others have.
    #[test]
    fn no_object_is_made_of_parts_that_refuse_each_other() {
        let document: Value = serde_json::from_str(&super::super::document()).unwrap();
        let schemas = document["components"]["schemas"].as_object().unwrap();
        let refuses = |parts: &Value| parts.to_string().contains("\"additionalProperties\":false");
        let refused: Vec<&String> = schemas
            .iter()
            .filter_map(|(name, schema)| schema.get("allOf").filter(|parts| refuses(parts)).map(|_| name))
            .collect();
        assert!(schemas["FleetCatalogSpec"]["properties"]["ram_bytes"].is_object());
        assert!(refused.is_empty(), "{refused:?}");
    }

    #[test]
    fn every_integer_has_bounds() {
        let document: Value = serde_json::from_str(&super::super::document()).unwrap();
        let mut found = Vec::new();
        unbounded("", &document, &mut found);
        assert_eq!(found, [""; 0], "spillway_api::bounds has no row for these");
        let whole = &document["components"]["schemas"]["CatalogSpec"];
        assert_eq!(whole["additionalProperties"], false);
        let spec = &whole["properties"];
        // Of its disks, whose settings are fields of its own.
        assert_eq!(spec["ram_bytes"]["minimum"], 64 << 10);
        assert_eq!(spec["memory_bytes"]["maximum"], 16_u64 << 40);
        assert_eq!(spec["memory_bytes"]["multipleOf"], 1 << 20);
        // The test finds what has none.
        unbounded(
            "x",
            &serde_json::json!({ "a": { "type": ["integer", "null"], "minimum": 0 } }),
            &mut found,
        );
        assert_eq!(found, ["x/a"]);
    }
}
