use super::super::testing::{fixtures, golden, scratch};
use super::*;
use serde_json::json;

/// A template in the style of Llama 3: dates, system prompt first, `trim`, error on an invalid role.
const LLAMA: &str = "\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now(\"%d %b %Y\") %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = \"\" %}
{%- endif %}
{{- \"<|start_header_id|>system<|end_header_id|>\\n\\n\" }}
{{- \"Today Date: \" + date_string + \"\\n\\n\" }}
{{- system_message }}
{{- \"<|eot_id|>\" }}
{%- for message in messages %}
    {%- if not (message.role == 'user' or message.role == 'assistant') %}
        {{- raise_exception(\"unknown role: \" + message.role) }}
    {%- endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
";

/// A template in the style of Qwen 3: namespaces, reversed lists, string methods, loop controls, block
/// trimming.
const QWEN: &str = "\
{% set ns = namespace(last=messages|length - 1) %}
{% for message in messages[::-1] %}
    {% set index = (messages|length - 1) - loop.index0 %}
    {% if message.role == 'user' and not message.content.startswith('<tool>') %}
        {% set ns.last = index %}
        {% break %}
    {% endif %}
{% endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- endif %}
    {%- if message.role == 'assistant' and '</think>' in content and loop.index0 < ns.last %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}";

#[test]
fn a_template_of_parts_gets_parts() {
    let source = "{% for m in messages %}[{{ m.role }}]{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}{% endfor %}";
    assert_eq!(render(source, &[ChatMessage::new("user", "hi")]).unwrap(), "[user]hi");
    for source in [
        "{{ messages[0].content | reverse }}",
        "{{ messages[0].content[:1] }}",
        "{{ messages[0].content | upper }}",
    ] {
        assert!(!template(source).needs_parts, "{source}");
    }
}

fn template(source: &str) -> ChatTemplate {
    ChatTemplate::new(source, Some("<s>".into()), Some("</s>".into())).expect("a template")
}

fn render(source: &str, messages: &[ChatMessage]) -> Result<String> {
    template(source).render(messages, true, &Map::new(), 1_795_180_271)
}

fn error(source: &str) -> String {
    render(source, &[ChatMessage::new("user", "hi")]).unwrap_err().to_string()
}

#[test]
fn fixtures_render_as_transformers_does() {
    for fixture in fixtures() {
        let chat = &golden(&fixture)["chat"];
        let messages: Vec<ChatMessage> = serde_json::from_value(chat["messages"].clone()).expect("messages");
        let template = ChatTemplate::open(&fixture).expect("readable").expect("a template");
        assert_eq!(template.render(&messages, true, &Map::new(), 0).expect("renders"), chat["rendered"]);
    }
}

#[test]
fn llama_style() {
    let messages = [ChatMessage::new("system", " Be brief. "), ChatMessage::new("user", "Hi\n")];
    assert_eq!(
        render(LLAMA, &messages).expect("renders"),
        "<s><|start_header_id|>system<|end_header_id|>\n\nToday Date: 20 Nov 2026\n\nBe brief.<|eot_id|>\
         <|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>\
         <|start_header_id|>assistant<|end_header_id|>\n\n"
    );
    assert_eq!(
        render(LLAMA, &[ChatMessage::new("wizard", "")]).unwrap_err().to_string(),
        "chat template: unknown role: wizard (line 19)"
    );
}

#[test]
fn qwen_style() {
    let messages = [
        ChatMessage::new("user", "1+1?"),
        ChatMessage::new("assistant", "<think>easy</think>\n\n2"),
        ChatMessage::new("user", "sure?"),
    ];
    let body = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n\
                <|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(render(QWEN, &messages).expect("renders"), body);
    let arguments = json!({"enable_thinking": false, "messages": []});
    let rendered = template(QWEN).render(&messages, true, arguments.as_object().expect("an object"), 0);
    assert_eq!(rendered.expect("renders"), format!("{body}<think>\n\n</think>\n\n"));
}

#[test]
fn json_is_written_as_python_writes_it() {
    let rendered = |source: &str| render(source, &[ChatMessage::new("user", "<é> & 'x'")]).expect("renders");
    assert_eq!(rendered("{{ messages|tojson }}"), r#"[{"role": "user", "content": "<é> & 'x'"}]"#);
    assert_eq!(rendered("{{ [1, []]|tojson(indent=2) }}"), "[\n  1,\n  []\n]");
    assert_eq!(
        rendered("{% generation %}a{% endgeneration %}{%- generation -%} b {%- endgeneration %}"),
        "ab"
    );
}

#[test]
fn special_tokens_and_templates_are_found_in_the_config() {
    let directory = scratch("chat");
    let config = directory.join("tokenizer_config.json");
    assert!(ChatTemplate::open(&directory).expect("readable").is_none());
    let write = |value: Json| std::fs::write(&config, value.to_string()).expect("a file");
    write(json!({"bos_token": {"content": "<b>"}, "eos_token": null, "chat_template": [
        {"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ bos_token }}{{ eos_token }}."}]}));
    let template = ChatTemplate::open(&directory).expect("readable").expect("a template");
    assert_eq!(template.render(&[], false, &Map::new(), 0).expect("renders"), "<b>.");
    write(json!({"chat_template": [{"name": "rag", "template": ""}]}));
    assert!(
        ChatTemplate::open(&directory)
            .unwrap_err()
            .to_string()
            .contains("tokenizer_config.json: field 'chat_template'")
    );
    std::fs::write(directory.join("chat_template.jinja"), "file").expect("a file");
    let template = ChatTemplate::open(&directory).expect("readable").expect("a template");
    assert_eq!(template.render(&[], false, &Map::new(), 0).expect("renders"), "file");
}

#[test]
fn what_fails_says_why() {
    assert!(ChatTemplate::new("{% if %}", None, None).unwrap_err().to_string().contains("line 1"));
    assert!(error("{{ raise_exception('roles must alternate') }}").contains("roles must alternate"));
    assert!(error("{{ nothing.at.all }}").starts_with("chat template: "));
}

#[test]
fn content_may_be_parts_and_unknown_fields_are_refused() {
    let parse = |value: Json| serde_json::from_value::<ChatMessage>(value).map_err(|e| e.to_string());
    let parts =
        json!({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]});
    assert_eq!(parse(parts), Ok(ChatMessage::new("user", "a\nb")));
    let echoed = json!({"role": "assistant", "content": null, "tool_calls": null, "name": "x"});
    assert_eq!(parse(echoed).expect("a message").extra["name"], "x");
    let refused = [
        (json!({"content": "x"}), "role"),
        (json!({"role": "user", "content": 3}), "content"),
        (json!({"role": "user", "content": [{"type": "image_url"}]}), "image_url"),
        (json!({"role": "user", "content": "x", "tool_calls": []}), "tool_calls"),
    ];
    for (value, word) in refused {
        assert!(parse(value).unwrap_err().contains(word));
    }
}

#[test]
fn a_template_that_takes_too_long_or_prints_too_much_is_stopped() {
    let endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}";
    assert_eq!(error(endless), "chat template: it takes too many steps for such a chat");
    let endless =
        "{% macro again() %}{% for a in range(9) %}{{ again() }}{% endfor %}{% endmacro %}{{ again() }}";
    assert!(error(endless).starts_with("chat template: "), "{}", error(endless));
    let wordy = "{% for a in range(99999) %}{{ 'x' * 10000 }}{% endfor %}";
    assert!(error(wordy).contains("prints more than 33554432 bytes"), "{}", error(wordy));
}

#[test]
fn real_templates_have_steps_to_spare_for_long_chats() {
    let turns = [ChatMessage::new("user", "hi"), ChatMessage::new("assistant", "ho")];
    let messages: Vec<ChatMessage> = turns.iter().cycle().take(4000).cloned().collect();
    for source in [LLAMA, QWEN] {
        render(source, &messages).expect("renders");
    }
}

#[test]
fn rendering_ends_when_nobody_waits_for_it() {
    let messages = vec![ChatMessage::new("user", "hi"); 100];
    let looks = std::cell::Cell::new(0);
    let leaves = || looks.replace(looks.get() + 1) == 10;
    let stopped = template(QWEN).render_until(&messages, true, &Map::new(), 0, &leaves);
    assert!(stopped.is_err());
    assert_eq!(looks.get(), 11);
}

#[test]
fn a_template_that_would_overflow_the_stack_of_its_parser_is_refused() {
    for source in [
        format!("{{{{ {}1 }}}}", "-".repeat(5000)),
        format!("{{{{ 1{} }}}}", "+1".repeat(5000)),
        format!("{{%- if a %}}{}{{% endif %}}", "{%- elif b %}".repeat(5000)),
    ] {
        let error = ChatTemplate::new(&source, None, None).unwrap_err().to_string();
        assert!(error.contains("more than 500 words and signs in a tag"), "{error}");
    }
    let long_text =
        format!("{{{{ '{}\\'%}}' }}}}{{% if x %}}{{% elif x == \"}}}}\" %}}{{% endif %}}", "a ".repeat(5000));
    let template = ChatTemplate::new(&long_text, None, None).unwrap();
    assert_eq!(template.render(&[], false, &Map::new(), 0).unwrap().len(), 10_003);
}

#[test]
fn a_tag_of_one_brace_is_no_tag() {
    let error = ChatTemplate::new("{%}", None, None).unwrap_err();
    assert!(matches!(error, Error::Template(_)), "{error}");
}

#[test]
fn what_jinja2_renders_is_rendered_alike() {
    // the expected values are jinja2's, in transformers' environment
    let cases = [
        ("{{ tools is none }}{{ documents is none }}{{ nothing is none }}", "TrueTrueFalse"),
        ("{{ (messages[0].tool_calls | length) == 0 }}", "True"),
        ("{{ messages[0].content[::-1] }}{{ messages[1:][::-1] | length }}", "ih0"),
        ("{{ [1, 2, 3, 4][3:0:-2] }}{{ 'abcdef'[-3:-1] }}{{ (1, 2, 3)[1:] }}", "[4, 2]de(2, 3)"),
        (
            "{% set c = {'z': 1, 'b': 2, 'a': 3} %}{% for k, v in c.items() %}{{ k }}{{ v }}{% endfor %}",
            "z1b2a3",
        ),
        (
            "{{ {'b': 1, 'a': [1, {}]} | tojson(separators=(',', ':'), sort_keys=true) }}",
            r#"{"a":[1,{}],"b":1}"#,
        ),
        ("{{ {'a': {}, 'b': [1]} | tojson(indent=2) }}", "{\n  \"a\": {},\n  \"b\": [\n    1\n  ]\n}"),
        ("{{ 'é😀' | tojson(ensure_ascii=True) }}", r#""\u00e9\ud83d\ude00""#),
        (
            "{{ [1e-7, 1e22, 1.0, 0.1 + 0.2, 1e16] | tojson }}",
            "[1e-07, 1e+22, 1.0, 0.30000000000000004, 1e+16]",
        ),
        ("{{ 'a,b,c'.rsplit(',', 1) }}{{ ' a  b '.split() }}", "['a,b', 'c']['a', 'b']"),
        (
            "{{ 'ab'.removeprefix('a') }}{{ 'a-b-c'.partition('-') }}{{ '-7'.zfill(4) }}",
            "b('a', '-', 'b-c')-007",
        ),
        ("{{ '%s-%03d|%5.1f' % ('x', 3, 2.25) }}{{ 7 % 3 }}{{ -7 % 3 }}", "x-003|  2.212"),
        ("{{ {} is sequence }}{{ raise_exception is callable }}{{ 'x' is iterable }}", "TrueTrueTrue"),
        ("{{ 'ab' * -1 }}|{{ +3 }}|{{ 'a' ~ none ~ 1.5 ~ [true] }}", "|3|aNone1.5[True]"),
        ("{{ [\"it's\", 'n\\n', none, (1,)] }}", r#"["it's", 'n\n', None, (1,)]"#),
        ("{{ dict([['a', 1]], b=2) }}{{ {'items': 1}['items'] }}", "{'a': 1, 'b': 2}1"),
        ("{{ 'a' 'b' }}{{ '\\x41\\d' }}", "abA\\d"),
        ("{{ 'a\\n\\nb' | indent(2, first=true) }}", "  a\n\n  b"),
        ("{{ ['b', 'A'] | sort }}{{ ['a', 'A'] | unique | list }}", "['A', 'b']['a']"),
        ("{{ '' | default('e', boolean=True) }}{{ {'a': 1} | items | list }}", "e[('a', 1)]"),
        ("{{ 'a' | safe + '<' }}{{ '<' | e }}", "a&lt;&lt;"),
        ("{{ (messages | map(attribute='role') | list)[0] if messages else '' }}", "user"),
        ("{% raw %}{{ a % b }}{% endraw %}{{ '{{ %}' }}", "{{ a % b }}{{ %}"),
        ("a{% raw %}\n b\n{% endraw %}\nc{% raw -%}\n d{% endraw %}", "a\n b\ncd"),
        (
            "{% for g in [{'k': 'x'}, {'k': 'x'}] | groupby('k') %}{{ g.grouper }}{{ g.list | length }}{% endfor %}",
            "x2",
        ),
        (
            "{% for k, l in [{'k': 'y'}, {'k': 'x'}] | groupby('k') %}{{ k }}{{ l }}{% endfor %}",
            "x[{'k': 'x'}]y[{'k': 'y'}]",
        ),
        (
            "{{ {'a': 1, 'b': 'x /'} | urlencode }}|{{ [('a', 1)] | urlencode }}|{{ 'a /' | urlencode }}",
            "a=1&b=x+%2F|a=1|a%20/",
        ),
        ("{{ {'b': [{'z': 1, 'y': 2}], 'a': 'x'} | pprint }}", "{'a': 'x', 'b': [{'y': 2, 'z': 1}]}"),
        ("{% autoescape true %}{{ '<' }}{{ '<' | safe }}{% endautoescape %}{{ '<' }}", "&lt;<<"),
        ("{{ 'Straße ſΣς'.casefold() }}{{ '{a}'.format_map({'a': 1}) }}", "strasse sσσ1"),
        (
            "{% macro f(x, y=x, z='q') %}{{ x }}{{ y }}{{ z }}{% endmacro %}{{ f(1) }}{{ f(1, 2) }}{{ f(1, y=3) }}",
            "11q12q13q",
        ),
        ("{% set a = 0 %}{% with a = 1, b = a %}{{ a }}{{ b }}{% endwith %}", "10"),
        (
            "{{ 1 < 2 < 3 }}{{ 3 > 2 > 2 }}{{ 1 < 2 == 2 }}{{ (1, 2) < (1, 3) }}{{ true >= 1 }}{{ 'a' < 'é' }}",
            "TrueFalseTrueTrueTrueTrue",
        ),
        ("{{ [true, 0] | sort }}{{ ['b', 'A'] | max }}{{ [2, 1, 1.0] | min }}{{ [] | max }}", "[0, True]b1"),
        ("{{ [{'a': 'x', 'b': 1}, {'a': 'y', 'b': none}] | sort(attribute='a,b') | length }}", "2"),
        ("{{ [1, 3] | select('gt', 2) | list }}{{ 2 is le 2 }}", "[3]True"),
    ];
    for (source, right) in cases {
        let rendered = render(source, &[ChatMessage::new("user", "hi")]);
        assert_eq!(rendered.map_err(|error| error.to_string()), Ok(right.to_owned()), "{source}");
    }
}

#[test]
fn what_jinja2_cannot_compare_or_iterate_is_an_error() {
    for source in [
        "{{ nothing < 1 }}",
        "{{ none > 1 }}",
        "{{ 'a' >= 1 }}",
        "{{ [1] < [none] }}",
        "{{ [1, 'a'] | sort }}",
        "{{ [none, 1] | max }}",
        "{{ [{'a': 1}, {}] | sort(attribute='a') }}",
        "{{ {'a': none, 'b': 1} | dictsort(by='value') }}",
        "{{ [{'a': 1}, {'a': none}] | selectattr('a', 'gt', 0) | list }}",
        "{% for x in none %}{% endfor %}",
        "{{ ('x' * 90 ~ ' y') | pprint }}",
    ] {
        assert!(render(source, &[ChatMessage::new("user", "hi")]).is_err(), "{source}");
    }
    assert_eq!(render("{% for x in nothing %}{% endfor %}ok", &[]).unwrap(), "ok");
}

#[test]
fn lines_end_as_in_python_and_blocks_leave_none() {
    let source = "{% for m in messages %}\r\n<{{ m.role }}>\r\n  {%- if true %}\r\n x\r{% endif %}\r\n{% endfor %}\r\nend\r\n";
    assert_eq!(render(source, &[ChatMessage::new("user", "")]).unwrap(), "<user> x\nend");
    let message = ChatMessage::new("user", "a\r\nb");
    assert_eq!(
        render("{{ messages[0].content }}", &[message]).unwrap(),
        "a\r\nb",
        "what a client wrote stays"
    );
}

#[test]
fn a_message_keeps_the_order_of_its_fields() {
    let parse = |text: &str| serde_json::from_str::<ChatMessage>(text).unwrap();
    let seen = |message: ChatMessage| render("{{ messages[0] | tojson }}", &[message]).unwrap();
    let other = r#"{"content": "c", "name": "n", "role": "user"}"#;
    assert_eq!(seen(parse(other)), other);
    assert_eq!(seen(parse(r#"{"role": "assistant", "content": null}"#)), r#"{"role": "assistant"}"#);
    let usual = parse(r#"{"role": "user", "content": "c"}"#);
    assert_eq!(usual, ChatMessage::new("user", "c"));
    assert_eq!(serde_json::to_string(&parse(other)).unwrap(), other.replace(": ", ":").replace(", ", ","));
}

#[test]
fn requests_with_tools_have_their_own_template() {
    let directory = scratch("tool-templates");
    let config = directory.join("tokenizer_config.json");
    let named = json!({"pad_token": "<pad>", "chat_template": [
        {"name": "default", "template": "plain{{ pad_token }}"},
        {"name": "tool_use", "template": "with {{ tools | length }}<tool_call>{{ tools | tojson }}"}]});
    std::fs::write(&config, named.to_string()).unwrap();
    let arguments = json!({"tools": [{"z": 1, "a": 2}]});
    let rendered = |arguments: &Json| {
        let template = ChatTemplate::open(&directory).unwrap().unwrap();
        assert_eq!(template.tool_style(), Some(ToolStyle::Tagged));
        template.render(&[], false, arguments.as_object().unwrap(), 0).unwrap()
    };
    assert_eq!(rendered(&json!({})), "plain<pad>");
    assert_eq!(rendered(&json!({"tools": null})), "plain<pad>");
    assert_eq!(rendered(&arguments), "with 1<tool_call>[{\"z\": 1, \"a\": 2}]");
    std::fs::write(&config, "{}").unwrap();
    std::fs::write(directory.join("chat_template.jinja"), "file").unwrap();
    std::fs::create_dir_all(directory.join("additional_chat_templates")).unwrap();
    std::fs::write(directory.join("additional_chat_templates/tool_use.jinja"), "tools <tool_call>").unwrap();
    assert_eq!(rendered(&json!({})), "file");
    assert_eq!(rendered(&arguments), "tools <tool_call>");
}

#[test]
fn operators_and_filters_take_no_memory_and_time_without_bound() {
    for (source, told) in [
        (
            "{% set ns = namespace(s='x' * 1000) %}{% for i in range(40) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
            "could exceed",
        ),
        (
            "{% set ns = namespace(s='x' * 1000) %}{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
            "could exceed",
        ),
        (
            "{% set ns = namespace(s=[1] * 1000) %}{% for i in range(40) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
            "could exceed",
        ),
        ("{{ [0] * 100000000 }}", "could exceed"),
        ("{{ 'x'.ljust(100000000) }}", "could exceed"),
        (
            "{% set l = range(90000) | list %}{% for i in range(2000) %}{% set x = l[1:] %}{% endfor %}",
            "too many steps",
        ),
        (
            "{% set ns = namespace(a=[]) %}{% for i in range(200) %}{% set ns.a = [ns.a] %}{% endfor %}{{ ns.a }}",
            "too deep",
        ),
        (
            "{% set ns = namespace(a=[]) %}{% for i in range(200) %}{% set ns.a = [ns.a] %}{% endfor %}{{ ns.a | tojson }}",
            "too deep",
        ),
        (
            "{% set ns = namespace(a=[1]) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}{% endfor %}{{ ns.a }}",
            "longer than",
        ),
    ] {
        let message = error(source);
        assert!(message.contains(told), "{source}: {message}");
    }
}

#[test]
fn filters_that_make_texts_long_are_bounded() {
    let fails =
        |template: &str| ChatTemplate::new(template, None, None).unwrap().render(&[], false, &Map::new(), 0);
    let joins = format!("{{{{ range(3)|list|join(',') {}}}}}", "|join(',') ".repeat(62));
    for (template, filter) in [
        (joins.as_str(), "join"),
        ("{{ range(9)|list|join('x' * 9000000) }}", "join"),
        ("{{ ('x' * 8000000)|replace('x', 'long') |replace('', 'x' * 9) }}", "replace"),
    ] {
        let error = fails(template).unwrap_err().to_string();
        assert!(error.contains(&format!("{filter}: its result could exceed")), "{template}: {error}");
    }
    assert_eq!(fails("{{ ['a', 'b']|join(', ') }}{{ 'axa'|replace('x', '--') }}").unwrap(), "a, ba--a");
}

#[test]
fn a_template_reads_what_it_does_not_set_itself() {
    // as gpt-oss's does
    let source = "{% macro m() %}{% if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}{% endif %}\
        {{ reasoning_effort }}{% endmacro %}{{ m() }}{% set own = 1 %}{{ own }}";
    let read = template(source);
    assert!(read.reads("reasoning_effort") && !read.reads("own") && !read.reads("documents"));
    assert!(!template("{# reasoning_effort #}reasoning_effort").reads("reasoning_effort"), "only words");
}
