//! Completeness of checkpoints: all tensors are present, and all are read.

use super::*;

#[test]
fn what_an_index_lists_and_nothing_needs_does_no_harm() {
    let directory = scratch("load-index-more");
    variant("llama2").write(&directory, 2).expect("a checkpoint");
    let text = std::fs::read(directory.join(INDEX)).expect("an index");
    let mut index: Value = serde_json::from_slice(&text).expect("an index");
    let map = index["weight_map"].as_object_mut().expect("a map");
    map.insert(
        "model.layers.0.self_attn.rotary_emb.inv_freq".into(),
        "model-00001-of-00002.safetensors".into(),
    );
    map.insert("model.layers.1.self_attn.rotary_emb.inv_freq".into(), "never-downloaded.safetensors".into());
    std::fs::write(directory.join(INDEX), index.to_string()).expect("a file");
    Checkpoint::open(&directory, &ReadFiles).expect("all that the model needs is there");
}

#[test]
fn a_tensor_that_nothing_reads_is_refused_by_name() {
    let with = |name: &str, tensor: &str| {
        let directory = scratch(&format!("load-{name}"));
        variant("llama2").write(&directory, 1).expect("a checkpoint");
        let file = directory.join("model.safetensors");
        let bytes = std::fs::read(&file).expect("a file");
        let end = 8 + u64::from_le_bytes(*bytes.first_chunk().expect("a length")) as usize;
        let mut header: Map<String, Value> = serde_json::from_slice(&bytes[8..end]).expect("a header");
        let at = bytes.len() - end;
        header.insert(tensor.into(), json!({"dtype": "F32", "shape": [1], "data_offsets": [at, at + 4]}));
        let data = [&bytes[end..], &1f32.to_le_bytes()].concat();
        write_parts(&file, Value::Object(header).to_string().as_bytes(), &data);
        Checkpoint::open(&directory, &ReadFiles)
    };
    for tensor in ["model.layers.0.self_attn.o_proj.bias", "model.layers.1.pre_feedforward_layernorm.weight"]
    {
        let error = with("unread", tensor).expect_err("refused").to_string();
        assert_says(&error, &["model.safetensors", tensor, "nothing here reads it"]);
    }
    with("derived", "model.layers.0.self_attn.rotary_emb.inv_freq")
        .expect("it follows from the configuration");
}

#[test]
fn a_folder_without_weights_says_what_is_there_instead() {
    let directory = scratch("load-none");
    variant("llama2").write(&directory, 1).expect("a checkpoint");
    let (safetensors, other) = (directory.join("model.safetensors"), directory.join("pytorch_model.bin"));
    std::fs::rename(&safetensors, &other).expect("renamed");
    let error = || Checkpoint::open(&directory, &ReadFiles).expect_err("no weights").to_string();
    assert_says(&error(), &["there are no weights", "pytorch_model.bin", "not supported"]);
    std::fs::rename(&other, directory.join("model-00001-of-00002.safetensors")).expect("renamed");
    assert_says(&error(), &["model-00001-of-00002.safetensors", "the index was not downloaded"]);
    std::fs::remove_file(directory.join("model-00001-of-00002.safetensors")).expect("removed");
    assert_says(&error(), &["--random-weights"]);
}

#[test]
fn a_share_of_a_repeating_checkpoint_is_that_of_the_whole() {
    let checkpoint = variant("llama3").repeating().expect("a checkpoint");
    let whole = MemoryDevice::new(false, 64);
    let share = &checkpoint.config.divided(2).expect("shares").shares()[1].clone();
    let weights = checkpoint.place_share(&whole, share, &mut |_, _| {}).expect("placed").expect("weights");
    let location = &checkpoint.tensors["model.layers.0.mlp.down_proj.weight"];
    let stored = checkpoint.bytes("model.layers.0.mlp.down_proj.weight").expect("stored");
    let cyclic = stored.iter().copied().cycle().take(location.bytes() as usize).collect::<Vec<u8>>();
    let (width, element) = (location.shape[1] as usize, location.dtype.size_bytes() as usize);
    let columns = share.inner.start as usize * element..share.inner.end as usize * element;
    let expected: Vec<u8> =
        cyclic.chunks_exact(width * element).flat_map(|row| row[columns.clone()].to_vec()).collect();
    let tensor = weights.get(0, Weight::Down).expect("an MLP");
    let mut bytes = vec![0; tensor.slice.bytes as usize];
    whole.read(&tensor.slice, &mut bytes).expect("read");
    assert!(bytes == expected);
}

#[test]
fn a_head_of_its_own_counts_though_the_configuration_ties_it() {
    let directory = scratch("load-own-head");
    variant("llama2").write(&directory, 1).expect("a checkpoint");
    let path = directory.join("config.json");
    let mut config: Map<String, Value> =
        serde_json::from_slice(&std::fs::read(&path).expect("a file")).expect("a configuration");
    config.insert("tie_word_embeddings".into(), true.into());
    std::fs::write(&path, Value::Object(config).to_string()).expect("a file");
    let open = || Checkpoint::open(&directory, &ReadFiles).expect("a checkpoint");
    let differs = open();
    assert!(!differs.config.tied_embeddings);
    let head = differs.bytes("lm_head.weight").expect("a head").to_vec();
    assert_ne!(head, differs.bytes("model.embed_tokens.weight").expect("an embedding"));
    // the same numbers in both are tied
    let weights = directory.join("model.safetensors");
    let mut bytes = std::fs::read(&weights).expect("a file");
    let embedding = differs.bytes("model.embed_tokens.weight").expect("an embedding");
    let at = bytes.windows(head.len()).position(|part| part == head).expect("the head");
    bytes[at..at + head.len()].copy_from_slice(embedding);
    std::fs::write(&weights, bytes).expect("a file");
    assert!(open().config.tied_embeddings);
}

#[test]
fn what_stands_in_place_of_weights_is_named() {
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n";
    let error = error_after("pointer", 1, |dir| {
        std::fs::write(dir.join("model.safetensors"), pointer).expect("a file");
    });
    assert_says(&error, &["model.safetensors", "Git LFS", "git lfs pull"]);
    let error = error_after("adapter", 1, |dir| {
        let adapter = dir.join("adapter_model.safetensors");
        std::fs::rename(dir.join("model.safetensors"), adapter).expect("a file");
    });
    assert_says(&error, &["an adapter", "merge it"]);
    let error = error_after("adapter-alone", 1, |dir| {
        std::fs::rename(dir.join("config.json"), dir.join("adapter_config.json")).expect("a file");
    });
    assert_says(&error, &["an adapter", "merge it"]);
    let error = error_after("scale", 1, |dir| {
        edit_header(&dir.join("model.safetensors"), |header| {
            let entry = json!({"dtype": "F32", "shape": [0], "data_offsets": [0, 0]});
            header.insert("model.layers.0.self_attn.q_proj.weight_scale".into(), entry);
        });
    });
    assert_says(&error, &["q_proj.weight_scale", "nothing here reads it"]);
    let error = error_after("absent-shard", 2, |dir| {
        let text = std::fs::read(dir.join(INDEX)).expect("an index");
        let mut index: Value = serde_json::from_slice(&text).expect("an index");
        index["weight_map"]["model.layers.9.bias"] = json!("model-00003-of-00003.safetensors");
        std::fs::write(dir.join(INDEX), index.to_string()).expect("a file");
    });
    assert_says(&error, &["model-00003-of-00003.safetensors"]);
}
