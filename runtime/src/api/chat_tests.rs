use super::*;

/// A message as a template sees it.
fn seen(message: &str) -> Result<String, String> {
    let raw: Box<RawValue> = serde_json::from_str(message).unwrap();
    let read = super::message(0, &raw, &mut 0).map_err(|error| error.to_json())?;
    Ok(serde_json::to_string(&read).unwrap())
}

#[test]
fn messages_are_taken_as_clients_send_them_back() {
    for (sent, right) in [
        (r#"{"content":"c","role":"user"}"#, r#"{"content":"c","role":"user"}"#),
        (
            r#"{"role":"developer","content":[{"type":"text","text":"a"},"b"]}"#,
            r#"{"role":"system","content":"a\nb"}"#,
        ),
        (
            r#"{"content":"c","refusal":null,"role":"assistant","annotations":[{"type":"url_citation"}],"audio":null,"function_call":null,"tool_calls":null}"#,
            r#"{"content":"c","role":"assistant"}"#,
        ),
        (r#"{"role":"assistant","content":null,"tool_calls":[]}"#, r#"{"role":"assistant"}"#),
        (r#"{"role":"assistant","content":null,"refusal":"no"}"#, r#"{"role":"assistant","content":"no"}"#),
        (
            r#"{"role":"assistant","content":[{"type":"refusal","refusal":"no"}]}"#,
            r#"{"role":"assistant","content":"no"}"#,
        ),
        (
            r#"{"role":"assistant","reasoning":"r","content":"c","reasoning_details":[{"text":"r"}]}"#,
            r#"{"thinking":"r","role":"assistant","reasoning":"r","content":"c","reasoning_content":"r"}"#,
        ),
        (
            r#"{"role":"assistant","content":"c","reasoning_content":"r","thinking":"t"}"#,
            r#"{"thinking":"t","role":"assistant","content":"c","reasoning_content":"r"}"#,
        ),
        (
            r#"{"role":"assistant","tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":"{\"z\": 1, \"a\": 2"}}]}"#,
            r#"{"role":"assistant","tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":{"z":1,"a":2}}}]}"#,
        ),
        (
            r#"{"tool_call_id":"1","role":"tool","content":"r","extra":[]}"#,
            r#"{"tool_call_id":"1","role":"tool","content":"r"}"#,
        ),
    ] {
        assert_eq!(seen(sent).as_deref(), Ok(right), "{sent}");
    }
    for (sent, field) in [
        (r#"{"role":"user","content":null}"#, "messages[0].content"),
        (r#"{"role":"user","content":"c","refusal":"no"}"#, "messages[0].refusal"),
        (r#"{"role":"assistant","content":"c","function_call":{"name":"f"}}"#, "messages[0].function_call"),
        (r#"{"role":"assistant","content":"c","reasoning":{"effort":1}}"#, "messages[0].reasoning"),
        (r#"{"role":"user","content":"c","weight":1}"#, "messages[0].weight"),
        (r#"{"role":"wizard","content":"c"}"#, "messages[0].role"),
    ] {
        let error = seen(sent).unwrap_err();
        assert!(error.contains(field), "{sent}: {error}");
    }
}
