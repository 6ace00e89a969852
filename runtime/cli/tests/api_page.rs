//! docs/reference/api.md lists the addresses that are routed, and the fields that are read.

use serde_json::Value;
use std::collections::BTreeSet;
use std::path::Path;

fn read(file: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(file)).unwrap()
}

/// Method and path of each route in the source, as in `.route("/live", get(live))`, or `post_prompt(..)`.
fn routed() -> BTreeSet<(String, String)> {
    let source = read("runtime/src/api/routes.rs");
    let routes = source.split(".route(\"").skip(1).map(|rest| {
        let (path, rest) = rest.split_once("\", ").expect("a path and a handler");
        let method = rest.split(['(', '_']).next().expect("a method");
        let path = path.replace("{*name}", "{name}");
        (method.to_uppercase(), path)
    });
    routes.collect()
}

#[test]
fn the_page_lists_the_addresses_that_are_routed() {
    let page = read("docs/reference/api.md");
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `")?.split_once('`'));
    let listed: BTreeSet<(String, String)> = rows
        .filter_map(|(address, _)| address.split_once(" /"))
        .map(|(method, path)| (method.to_owned(), format!("/{path}")))
        .collect();
    assert!(listed.len() > 8, "{listed:?}");
    assert_eq!(listed, routed());
}

#[test]
fn the_description_for_programs_has_the_same_addresses_and_fields() {
    let document: Value = serde_json::from_str(&read("runtime/src/api/openapi.json")).unwrap();
    let paths = document["paths"].as_object().unwrap().iter();
    let described: BTreeSet<(String, String)> = paths
        .flat_map(|(path, methods)| {
            methods.as_object().unwrap().keys().map(|method| (method.to_uppercase(), path.clone()))
        })
        .collect();
    assert_eq!(described, routed());
    let page = read("docs/reference/api.md");
    let (_, table) = page.split_once("## Fields on devices of this fleet").unwrap();
    let (table, _) = table.split_once("Refused with a 400").unwrap();
    let first_cells = table.lines().filter_map(|line| line.strip_prefix("| `")?.split_once('|'));
    let on_the_page: BTreeSet<&str> = first_cells
        .flat_map(|(cell, _)| cell.split(|c: char| !c.is_ascii_alphanumeric() && c != '_'))
        .filter(|word| !["", "chat", "completions", "or", "and", "unknown", "fields"].contains(word))
        .collect();
    let schemas = &document["components"]["schemas"];
    let fields: BTreeSet<&str> = ["ChatRequest", "CompletionRequest"]
        .into_iter()
        .flat_map(|name| schemas[name]["properties"].as_object().unwrap().keys().map(String::as_str))
        .collect();
    assert_eq!(fields, on_the_page);
    assert!(fields.len() > 40, "{fields:?}");
}

#[test]
fn the_page_names_every_field_that_is_refused() {
    let source = read("runtime/src/api/refused.rs");
    let page = read("docs/reference/api.md");
    let fields =
        source.lines().filter_map(|line| line.trim().strip_prefix("(\"")?.split_once("\", Neutral::"));
    let (_, elsewhere) = source.split_once("const ELSEWHERE").unwrap();
    let (elsewhere, _) = elsewhere.split_once("\n];").unwrap();
    let lists = elsewhere.split("(&[").skip(1).filter_map(|row| row.split_once(']'));
    let elsewhere = lists.flat_map(|(names, _)| names.split('"').skip(1).step_by(2));
    let mut count = 0;
    for field in fields.map(|(field, _)| field).chain(elsewhere) {
        assert!(page.contains(&format!("`{field}`")), "docs/reference/api.md says nothing of {field}");
        count += 1;
    }
    assert!(count > 100, "{count}");
}
