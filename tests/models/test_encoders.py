"""Published models that are no decoders: what transformers computes with its folders, the same files back, refusals."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from polyreme.distributed.placement import clear_plan
from polyreme.eager.tensor import to_tensor
from polyreme.errors import CheckpointError, ConfigError, ShapeError
from polyreme.mesh import Plan
from polyreme.models import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    Swin,
    SwinConfig,
)
from polyreme.models.encoder_decoders.t5 import T5Config
from polyreme.models.encoders.bert import Bert, BertConfig, BertForMaskedLM, BertForSequenceClassification
from polyreme.models.pretrained import load_pretrained
from polyreme.recipes.weights import published
from tests.models import parity
from tests.models.test_published import change_config, change_weights

FOLDERS = parity.FIXTURES / "encoders"
NAMES = sorted(folder.name for folder in FOLDERS.iterdir())


@pytest.fixture
def copied(tmp_path):
    """A copy of the folder of a BERT for masked words, to be changed."""
    return Path(shutil.copytree(FOLDERS / "bert_masked_lm", tmp_path / "bert"))


def assert_recorded(model, name, only=slice(None)):
    """The model's outputs are transformers'; only: those of them that it has."""
    recorded = load_file(FOLDERS / name / "recorded.safetensors")
    inputs = {key: to_tensor(array) for key, array in recorded.items() if not key.startswith("output/")}
    wanted = [recorded[f"output/{i}"] for i in range(len(recorded) - len(inputs))][only]
    outputs = model(**inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    config = getattr(model.config, "text", model.config)
    if hasattr(config, "depths"):  # blocks of convolutions, whose sums are of 7 x 7 pixels
        width, depth = max(49, *config.hidden_sizes), sum(config.depths) + len(config.depths)
        sizes = {"hidden_size": width, "ffn_size": 4 * width, "num_heads": 1, "num_layers": depth}
    else:
        sizes = {key: getattr(config, key) for key in ("hidden_size", "ffn_size", "num_heads", "num_layers")}
    # a block of a T5's decoder attends twice
    sizes["num_layers"] += 2 * getattr(config, "num_decoder_layers", 0)
    terms = parity.forward_terms(sizes, getattr(config, "seq_len", 16))
    for got, want in zip(outputs, wanted, strict=True):
        np.testing.assert_allclose(got.numpy(), want, rtol=0, atol=parity.tolerance(terms, want))


@pytest.mark.slow_cases(
    *("mpnet_classification", "roberta_classification", "xlm_roberta_token_classification", "convnext_classification"),
    *("deberta_v2_token_classification", "electra_classification", "albert_classification", "distilbert_masked_lm"),
    *("camembert_classification", "mixtral_classification", "gpt2_token_classification", "mt5"),
    *("modernbert_classification", "distilbert_classification", "swin_classification", "llava_siglip"),
)
@pytest.mark.parametrize("name", NAMES)
def test_a_folder_gives_what_transformers_computes_and_is_written_as_it_was(name, tmp_path):
    model = load_pretrained(FOLDERS / name)
    assert_recorded(model, name)
    assert not model.training

    model.save_pretrained(tmp_path)
    written, want = (load_file(folder / "model.safetensors") for folder in (tmp_path, FOLDERS / name))
    assert written.keys() == want.keys()
    for key, array in want.items():
        np.testing.assert_array_equal(written[key], array, err_msg=key)
    assert AutoConfig.from_pretrained(tmp_path) == model.config
    configs = [json.loads((folder / "config.json").read_text()) for folder in (tmp_path, FOLDERS / name)]
    assert configs[0]["architectures"] == configs[1]["architectures"]


def test_a_model_for_a_task_of_weights_for_another():
    """The body of a model with a head; a new head where it is asked for."""
    folder = FOLDERS / "bert_classification"
    body = AutoModel.from_pretrained(folder)
    assert type(body) is Bert
    scored = AutoModelForSequenceClassification.from_pretrained(folder)
    assert scored.config.label_names == ("no", "yes", "perhaps")
    ids = to_tensor([[5, 6, 7]])
    np.testing.assert_array_equal(body(ids)[1].numpy(), scored.encoder(ids)[1].numpy())
    with pytest.raises(CheckpointError, match=r"missing: classifier.bias, classifier.weight; give new_head=True"):
        BertForSequenceClassification.from_pretrained(FOLDERS / "bert")
    new = BertForSequenceClassification.from_pretrained(FOLDERS / "bert", new_head=True, num_labels=5)
    assert_recorded(new.encoder, "bert")
    assert new(ids).shape == [1, 5]
    assert np.abs(new.classifier.weight.numpy()).max() > 0
    with pytest.raises(CheckpointError, match=r"missing: cls.predictions.bias, .*new_head=True"):
        AutoModelForMaskedLM.from_pretrained(folder)
    with pytest.raises(
        ConfigError, match=r"weights of a BertForMaskedLM; load them with AutoModel or AutoModelForMask"
    ):
        AutoModelForCausalLM.from_pretrained(FOLDERS / "bert_masked_lm")


def test_pairs_are_told_apart():
    """A SigLIP's loss is that of each pair for itself; what is refused."""
    model = AutoModel.from_pretrained(FOLDERS / "siglip")
    recorded = load_file(FOLDERS / "siglip" / "recorded.safetensors")
    ids, images = (to_tensor(recorded[name]) for name in ("input_ids", "pixel_values"))
    scores = model(ids, images)[1].numpy().astype("float64")
    want = np.log1p(np.exp(-(2 * np.eye(2) - 1) * scores)).sum(-1).mean()
    loss = float(model(ids, images, return_loss=True))
    np.testing.assert_allclose(loss, want, rtol=0, atol=50 * parity.EPS * np.abs(scores).max())
    with pytest.raises(ShapeError, match="2 texts and 1 images; give one for each"):
        model(ids, images[:1], return_loss=True)
    with pytest.raises(ConfigError, match="texts are compared in 24 dims and images in 20"):
        AutoConfig.from_pretrained(FOLDERS / "siglip", text=dataclasses.replace(model.config.text, projection_dim=24))


def test_a_decoder_scores_texts():
    """By the last token, on whichever side a row is padded; losses are those of the scores; a new head on the weights
    of a writer."""
    scorer = AutoModelForSequenceClassification.from_pretrained(FOLDERS / "llama_classification")
    ids, mask = np.array([[5, 6, 7, 8], [1, 1, 9, 4]]), np.array([[1, 1, 1, 1], [0, 0, 1, 1]])
    padded = scorer(to_tensor(ids), attention_mask=to_tensor(mask)).numpy()
    alone = scorer(to_tensor(ids[1:, 2:])).numpy()
    atol = 200 * parity.EPS * np.abs(padded).max()
    np.testing.assert_allclose(padded[1:], alone, rtol=0, atol=atol)
    loss = float(scorer(to_tensor(ids), attention_mask=to_tensor(mask), labels=to_tensor([2, 0])))
    logs = padded - np.log(np.exp(padded.astype("float64")).sum(-1, keepdims=True))
    np.testing.assert_allclose(loss, -(logs[0, 2] + logs[1, 0]) / 2, rtol=1e-5)

    judge = AutoModelForSequenceClassification.from_pretrained(FOLDERS / "mixtral_classification")
    numbers = judge(to_tensor(ids)).numpy()[:, 0]
    loss = float(judge(to_tensor(ids), labels=to_tensor([0.5, -1.0])))
    np.testing.assert_allclose(loss, np.mean((numbers - [0.5, -1.0]) ** 2), rtol=1e-5)
    judge.train()  # the routers' losses too, of two blocks about 1 each
    assert 0.01 < float(judge(to_tensor(ids), labels=to_tensor([0.5, -1.0]))) - loss < 0.1

    writer = parity.FIXTURES / "folders" / "llama"
    with pytest.raises(CheckpointError, match=r"missing: score.weight; give new_head=True"):
        AutoModelForSequenceClassification.from_pretrained(writer)
    new = AutoModelForSequenceClassification.from_pretrained(writer, new_head=True, label_names=("bad", "good"))
    assert new(to_tensor(ids)).shape == [2, 2]
    assert AutoModel.from_pretrained(writer)(to_tensor(ids)).shape == [2, 4, 24]
    with pytest.raises(ConfigError, match="num_labels is 3, and 2 have a name"):
        AutoConfig.from_pretrained(FOLDERS / "llama_classification", num_labels=3, label_names=("bad", "good"))
    with pytest.raises(ConfigError, match=r"LlamaForSequenceClassification; load them with AutoModel.*Token"):
        AutoModelForMaskedLM.from_pretrained(FOLDERS / "llama_classification")


def test_tokens_are_labelled_and_answers_found():
    """Losses are the cross-entropies of the scores; a new head on the body's weights."""
    scorer = AutoModelForTokenClassification.from_pretrained(FOLDERS / "bert", new_head=True, num_labels=4)
    ids = to_tensor([[5, 6, 7], [8, 9, 1]])
    scores = scorer(ids).numpy().astype("float64")
    logs = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    loss = float(scorer(ids, labels=to_tensor([[2, -100, 0], [1, 3, -100]])))
    want = -np.mean([logs[0, 0, 2], logs[0, 2, 0], logs[1, 0, 1], logs[1, 1, 3]])
    np.testing.assert_allclose(loss, want, rtol=0, atol=50 * parity.EPS * np.abs(scores).max())
    finder = AutoModelForQuestionAnswering.from_pretrained(FOLDERS / "bert_question_answering")
    spans = [part.numpy().astype("float64") for part in finder(ids)]
    logs = [part - np.log(np.exp(part).sum(-1, keepdims=True)) for part in spans]
    loss = float(finder(ids, start_positions=to_tensor([0, 1]), end_positions=to_tensor([2, 1])))
    want = -np.mean([logs[0][0, 0], logs[0][1, 1], logs[1][0, 2], logs[1][1, 1]])
    np.testing.assert_allclose(loss, want, rtol=0, atol=50 * parity.EPS * np.abs(spans).max())
    with pytest.raises(ConfigError, match="give start_positions and end_positions, or neither"):
        finder(ids, start_positions=to_tensor([0, 1]))


def test_images_are_scored(tmp_path):
    """A ViT whose parts do not fit is refused; its loss is the cross-entropy of its scores; a new head."""
    folder = FOLDERS / "vit_classification"
    model = AutoModelForImageClassification.from_pretrained(folder)
    image = load_file(folder / "recorded.safetensors")["pixel_values"]
    scores = model(to_tensor(image)).numpy().astype("float64")
    want = np.mean(np.log(np.exp(scores).sum(-1)) - scores[[0, 1], [2, 0]])
    loss = float(model(to_tensor(image), labels=to_tensor([2, 0])))
    np.testing.assert_allclose(loss, want, rtol=0, atol=50 * parity.EPS * np.abs(scores).max())
    with pytest.raises(ShapeError, match="their sides must be img_size=8"):
        model(to_tensor(image[:, :, :4]))
    with pytest.raises(CheckpointError, match=r"missing: classifier.bias, classifier.weight; give new_head=True"):
        AutoModelForImageClassification.from_pretrained(FOLDERS / "vit")
    with pytest.raises(CheckpointError, match=r"missing: vit.pooler.dense.bias, .*; give new_head=True"):
        AutoModel.from_pretrained(folder)
    copy = Path(shutil.copytree(folder, tmp_path / "vit"))

    def change(weights):
        name = "vit.encoder.layer.0.attention.attention.key.weight"
        weights[name] = weights[name][:12]

    change_weights(copy, change)
    with pytest.raises(ShapeError, match=r"one here have shapes \[\[24, 24\], \[12, 24\], \[24, 24\]\]"):
        AutoModelForImageClassification.from_pretrained(copy)
    change_config(copy, hidden_act="relu")
    with pytest.raises(ConfigError, match="hidden_act is 'relu', and only 'gelu'"):
        AutoConfig.from_pretrained(copy)


def test_masked_patches_and_pictures_of_other_sides():
    """A DINOv2 has the mask token in place of a patch, whatever was there, and says which sides it takes."""
    model = AutoModelForImageClassification.from_pretrained(FOLDERS / "dinov2_classification")
    recorded = load_file(FOLDERS / "dinov2_classification" / "recorded.safetensors")
    image, covered = recorded["pixel_values"], np.zeros((2, 4), bool)
    other = image.copy()
    other[:, :, 4:, :4] = 7.0
    covered[:, 2] = True
    hidden = [model.encoder(to_tensor(x), bool_masked_pos=to_tensor(covered))[0].numpy() for x in (image, other)]
    np.testing.assert_array_equal(*hidden)
    assert np.abs(hidden[0] - model.encoder(to_tensor(image))[0].numpy()).max() > 0.01
    with pytest.raises(ShapeError, match=r"images have shape \[2, 3, 8, 6\]; give .* multiples of 4"):
        model(to_tensor(image[..., :6]))
    gated = AutoModel.from_pretrained(FOLDERS / "dinov2_gated")
    with pytest.raises(ConfigError, match="bool_masked_pos of a model without a mask token; leave it out"):
        gated(to_tensor(image), bool_masked_pos=to_tensor(covered))
    with pytest.raises(ShapeError, match=r"images have shape \[2, 3, 2, 8\]; give .* both of 4 or more"):
        AutoModel.from_pretrained(FOLDERS / "convnext")(to_tensor(image[:, :, :2]))


def test_windows_want_enough_of_an_image_and_training_drops_paths():
    """A Swin refuses sides below a window; training with a drop_path of 1 goes without the last block's attention."""
    config = SwinConfig(4, depths=(1, 1), num_heads=(1, 2), window_size=2, patch_size=2, drop_path=1.0)
    model = Swin(config)
    with pytest.raises(ShapeError, match=r"images have shape \[2, 3, 8, 4\]; give .* both of 5 or more"):
        model(to_tensor(np.zeros((2, 3, 8, 4), np.float32)))
    block = model.stages[1].blocks[0].train()
    x = to_tensor(np.random.default_rng(0).standard_normal((2, 2, 2, 8), "float32"))
    block.attention.attention.out.bias.set_value(np.arange(8, dtype="float32"))
    np.testing.assert_array_equal(block(x).numpy(), (x + block.ffn(block.ffn_norm(x))).numpy())
    assert np.abs(block.eval()(x).numpy() - block.train()(x).numpy()).max() > 1


def test_texts_and_images_are_compared(tmp_path):
    """A CLIP pools at the first end of a text, or at its highest id in older files; its loss; what is refused."""
    model = AutoModel.from_pretrained(FOLDERS / "clip")
    recorded = load_file(FOLDERS / "clip" / "recorded.safetensors")
    images, per_text = recorded["pixel_values"], recorded["output/1"].astype("float64")
    inputs = {key: to_tensor(recorded[key]) for key in ("input_ids", "pixel_values", "attention_mask")}
    both = [np.mean(np.log(np.exp(scores).sum(-1)) - np.diag(scores)) for scores in (per_text, per_text.T)]
    loss = model(**inputs, return_loss=True)
    np.testing.assert_allclose(float(loss), np.mean(both), rtol=0, atol=200 * parity.EPS * np.abs(per_text).max())

    ids = np.array([[5, 24, 47, 24], [47, 6, 24, 7]])
    hidden = model.text(to_tensor(ids))[0].numpy()
    np.testing.assert_array_equal(model.text(to_tensor(ids))[1].numpy(), hidden[[0, 1], [1, 2]])
    old = Path(shutil.copytree(FOLDERS / "clip", tmp_path / "clip"))
    config = json.loads((old / "config.json").read_text())
    change_config(old, text_config=config["text_config"] | {"eos_token_id": 2})
    np.testing.assert_array_equal(
        AutoModel.from_pretrained(old).text(to_tensor(ids))[1].numpy(), hidden[[0, 1], [2, 0]]
    )

    with pytest.raises(ShapeError, match=r"pixel_values have shape \[2, 3, 4, 8\]; give \[batch, 3, 8, 8\]"):
        model(to_tensor(ids), to_tensor(images[:, :, :4]))
    with pytest.raises(ShapeError, match=r"input_ids have shape \[1, 17\]; give \[batch, seq\], seq at most 16"):
        model.get_text_features(to_tensor(np.zeros((1, 17), np.int64)))
    with pytest.raises(ShapeError, match="2 texts and 1 images; give one for each"):
        model(to_tensor(ids), to_tensor(images[:1]), return_loss=True)
    change_config(old, vision_config=config["vision_config"] | {"image_size": 10})
    with pytest.raises(ConfigError, match="image_size 10 is not a multiple of patch_size 4"):
        AutoConfig.from_pretrained(old)
    change_config(old, vision_config=config["vision_config"] | {"num_registers": 4})
    with pytest.raises(ConfigError, match="clip_vision_model has keys that are not known here: num_registers=4"):
        AutoConfig.from_pretrained(old)
    assert AutoConfig.from_pretrained(old, ignore=["num_registers"]).vision == model.config.vision


def test_a_text_is_written_of_another(tmp_path):
    """A T5's loss is that of the ids it begins with start and shifts; padding, future and distances; refusals."""
    model = AutoModelForSeq2SeqLM.from_pretrained(FOLDERS / "t5")
    ids, labels = np.array([[5, 6, 7, 8]]), np.array([[9, 3, -100]])
    shifted = to_tensor([[0, 9, 3]])
    logits = model(to_tensor(ids), decoder_input_ids=shifted).numpy()[0].astype("float64")
    want = np.mean((np.log(np.exp(logits).sum(-1)) - logits[range(3), [9, 3, 0]])[:2])
    loss = model(to_tensor(ids), labels=to_tensor(labels))
    np.testing.assert_allclose(float(loss), want, rtol=0, atol=200 * parity.EPS * np.abs(logits).max())

    mask = to_tensor([[1, 1, 1, 0]])
    seen = [
        model(to_tensor(row), mask, to_tensor(written)).numpy()[:, :2]
        for row, written in ((ids, [[0, 9, 3]]), (ids * [1, 1, 1, 2], [[0, 9, 4]]))
    ]
    np.testing.assert_array_equal(*seen)
    with pytest.raises(ConfigError, match="neither decoder_input_ids nor labels"):
        model(to_tensor(ids))
    with pytest.raises(ShapeError, match=r"ids have shape \[4\]; give \[batch, seq\]"):
        model(to_tensor(ids[0]), labels=to_tensor(labels))
    with pytest.raises(
        ConfigError, match="weights of a T5ForConditionalGeneration; load them with AutoModelForSeq2SeqLM"
    ):
        AutoModel.from_pretrained(FOLDERS / "t5")
    with pytest.raises(ConfigError, match="num_buckets 6 and max_distance 128"):
        T5Config.nano(num_buckets=6)
    old = Path(shutil.copytree(FOLDERS / "t5", tmp_path / "t5"))

    def change(weights):
        weights["encoder.embed_tokens.weight"] = weights["shared.weight"]
        weights["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = np.zeros((8, 4), np.float32)

    change_weights(old, change)
    change_config(old, architectures=["T5WithLMHeadModel"], n_positions=512)
    assert_recorded(AutoModelForSeq2SeqLM.from_pretrained(old), "t5")
    change_config(old, feed_forward_proj="twice-gelu")
    with pytest.raises(ConfigError, match="feed_forward_proj is 'twice-gelu'"):
        AutoConfig.from_pretrained(old)
    lines = []
    published.convert(FOLDERS / "t5_gated", tmp_path / "gated", verify=True, say=lines.append)
    assert lines[1].startswith("outputs       the same bits")


def test_older_spellings(copied):
    """Norms' gamma and beta, copies of the embedding and its bias, a second head, indices: as old files have them."""

    def change(weights):
        for name in [*weights]:
            old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
            weights[old] = weights.pop(name)
        weights["cls.predictions.decoder.weight"] = weights["bert.embeddings.word_embeddings.weight"]
        weights["cls.seq_relationship.weight"] = np.zeros((2, 24), np.float32)
        weights["bert.embeddings.position_ids"] = np.arange(16)[None]

    change_weights(copied, change)
    change_config(copied, architectures=["BertForPreTraining"])
    assert_recorded(AutoModelForMaskedLM.from_pretrained(copied), "bert_masked_lm")
    with pytest.raises(ConfigError, match="weights of a BertForPreTraining; load them with AutoModel or AutoModelForM"):
        list(published.check_lines(copied))


def test_t5_as_transformers_5_says_it(tmp_path):
    """Of every T5 that its embeddings are tied, and by another key whether what the head takes is scaled."""
    folder = Path(shutil.copytree(FOLDERS / "t5_gated", tmp_path / "t5"))
    config = json.loads((folder / "config.json").read_text())
    config |= {"tie_word_embeddings": True, "scale_decoder_outputs": False}
    (folder / "config.json").write_text(json.dumps(config))
    assert AutoConfig.from_pretrained(folder) == AutoConfig.from_pretrained(FOLDERS / "t5_gated")
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors")
    tied = AutoConfig.from_pretrained(folder)
    assert (tied.tie_embeddings, tied.scale_outputs) == (True, False)


def test_a_body_without_its_prefix_takes_a_head(copied):
    folder = FOLDERS / "bert"
    prefixed = {f"bert.{name}": array for name, array in load_file(folder / "model.safetensors").items()}
    shutil.copy(folder / "config.json", copied)
    save_file(prefixed, copied / "model.safetensors")
    assert_recorded(AutoModel.from_pretrained(copied), "bert")


def test_padding_is_seen_by_nobody():
    model = AutoModel.from_pretrained(FOLDERS / "bert")
    ids, mask = np.array([[5, 6, 7, 8]]), np.array([[1, 1, 0, 0]])
    hidden = [model(to_tensor(row), attention_mask=to_tensor(mask))[0].numpy() for row in (ids, ids * [1, 1, 2, 3])]
    np.testing.assert_array_equal(hidden[0][:, :2], hidden[1][:, :2])
    with pytest.raises(ShapeError, match=r"attention_mask has shape \[1, 3\]; give that of the ids, \[1, 4\]"):
        model(to_tensor(ids), attention_mask=to_tensor(mask[:, :3]))
    with pytest.raises(ShapeError, match=r"input_ids have shape \[1, 17\]; give \[batch, seq\], seq at most 16"):
        model(to_tensor(np.zeros((1, 17), np.int64)))
    with pytest.raises(ConfigError, match="task_type_ids of a model with num_task_types=0"):
        model(to_tensor(ids), task_type_ids=to_tensor(ids * 0))


def test_distances_to_padding_count_for_nothing():
    """In a DeBERTa: what stands there changes nothing, and the text alone has the same outputs."""
    model = AutoModel.from_pretrained(FOLDERS / "deberta_v2")
    ids, mask = np.array([[5, 6, 7, 8]]), to_tensor(np.array([[1, 1, 1, 0]]))
    first, second = (model(to_tensor(row), attention_mask=mask).numpy()[:, :3] for row in (ids, ids * [1, 1, 1, 4]))
    np.testing.assert_array_equal(first, second)
    alone = model(to_tensor(ids[:, :3])).numpy()
    sizes = {key: getattr(model.config, key) for key in ("hidden_size", "ffn_size", "num_heads", "num_layers")}
    atol = parity.tolerance(parity.forward_terms(sizes, 4), alone)
    np.testing.assert_allclose(first, alone, rtol=0, atol=atol)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("deberta_v2", {"pos_att_type": "c2p"}, "only c2p with p2c can be had here"),
        ("deberta_masked_lm", {"pos_att_type": ["p2c"]}, "only c2p with p2c can be had here"),
        ("deberta_masked_lm", {"talking_head": True}, "talking_head is True, and only False can be had here"),
        ("deberta_v2", {"conv_kernel_size": 3}, "conv_kernel_size is 3, and only 0 or None"),
        ("deberta_v2", {"norm_rel_ebd": "batch"}, "norm_rel_ebd is 'batch'; only none or layer_norm"),
        ("modernbert", {"attention_bias": True}, "attention_bias is True, and only False can be had here"),
        ("modernbert", {"classifier_pooling": "last"}, "pooling 'last'; give 'cls' or 'mean'"),
        ("modernbert", {"num_attention_heads": 8}, r"not a multiple of 2 \* num_heads = 16"),
        ("dinov2", {"num_attention_heads": 5}, "hidden_size 24 is not a multiple of num_heads 5; make it 20 or 25"),
        ("convnext", {"depths": [2, 1, 1]}, r"depths \[2, 1, 1\]; give a whole number of 1 or more for each stage"),
        ("convnext", {"hidden_sizes": 8}, "hidden_sizes 8; give a whole number"),
        ("swin", {"num_heads": [1, 3]}, "width 16, of embed_dim 8, is not a multiple of its 3 heads; make it 15 or 18"),
        ("swin", {"num_heads": [1]}, r"num_heads \[1\]; give a whole number of 1 or more for each stage"),
        ("swin", {"use_absolute_embeddings": True}, "use_absolute_embeddings is True, and only False can be had here"),
        ("albert", {"inner_group_num": 2}, "inner_group_num is 2, and only 1 can be had here"),
        ("albert", {"num_hidden_layers": 3, "num_hidden_groups": 2}, "num_layers 3 is not a multiple of num_groups 2"),
    ],
)
def test_an_encoder_that_cannot_be_had_is_refused(name, changes, message, tmp_path):
    folder = Path(shutil.copytree(FOLDERS / name, tmp_path / name))
    change_config(folder, **changes)
    with pytest.raises(ConfigError, match=message):
        AutoConfig.from_pretrained(folder)


def test_losses_of_labels():
    """As NumPy's of the logits, places labelled -100 left out."""
    model = BertForMaskedLM.from_pretrained(FOLDERS / "bert_masked_lm")
    ids, labels = np.array([[5, 6, 7, 8]]), np.array([[-100, 3, -100, 9]])
    logits = model(to_tensor(ids)).numpy()[0].astype("float64")
    log_sums = np.log(np.exp(logits).sum(-1))
    want = np.mean([log_sums[1] - logits[1, 3], log_sums[3] - logits[3, 9]])
    loss = model(to_tensor(ids), labels=to_tensor(labels))
    np.testing.assert_allclose(float(loss), want, rtol=0, atol=50 * parity.EPS * np.abs(logits).max())
    one = BertForSequenceClassification(BertConfig.nano(num_labels=1, dropout=0.0, attention_dropout=0.0))
    scores = one(to_tensor(ids)).numpy()[:, 0]
    np.testing.assert_allclose(float(one(to_tensor(ids), labels=to_tensor([2.0]))), (scores - 2) ** 2, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [("bert_masked_lm", BertForMaskedLM), ("clip", AutoModel), ("t5", AutoModelForSeq2SeqLM)],
    ids=["bert", "clip", "t5"],
)
def test_every_parameter_has_a_gradient_of_the_loss(name, kind):
    model = kind.from_pretrained(FOLDERS / name)
    ids = to_tensor([[5, 6, 7, 8], [8, 5, 7, 6]])
    if name == "clip":
        images = to_tensor(load_file(FOLDERS / name / "recorded.safetensors")["pixel_values"])
        loss = model(ids, images, return_loss=True)
    else:
        loss = model(ids, labels=ids)
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.slow_cases("dinov2_classification", "bert_masked_lm", "convnext_classification", "swin_classification")
@pytest.mark.parametrize(
    "name",
    [
        *("bert_masked_lm", "modernbert_masked_lm"),
        *("dinov2_classification", "convnext_classification", "swin_classification"),
    ],
)
def test_a_plan_splits_an_encoder(name):
    plan = Plan.from_degrees(mp=2, sharding=2, sharding_stage=3)
    try:
        model = load_pretrained(FOLDERS / name, plan=plan, devices=jax.devices()[:4])
        split = [p for p in model.parameters() if p._array.addressable_shards[0].data.size < p.size]
        assert len(split) > len(model.parameters()) / 2
        assert_recorded(model, name)
    finally:
        clear_plan()


def test_configs_that_cannot_be():
    with pytest.raises(ConfigError, match="hidden_size 32 is not a multiple of num_heads 5"):
        BertConfig.nano(num_heads=5)
    with pytest.raises(ConfigError, match="unknown activation 'gelo'; did you mean 'gelu'"):
        BertConfig.nano(activation="gelo")
    with pytest.raises(ConfigError, match="num_labels is 2, and 1 have a name"):
        BertConfig.nano(label_names=("yes",))


def test_what_an_encoder_is_not(copied):
    change_config(copied, position_embedding_type="relative_key")
    with pytest.raises(ConfigError, match="position_embedding_type is 'relative_key', and only 'absolute'"):
        AutoModelForMaskedLM.from_pretrained(copied)
    change_config(copied, position_embedding_type="absolute")

    def change(weights):
        weights["cls.predictions.extra"] = np.zeros(2, np.float32)

    change_weights(copied, change)
    with pytest.raises(CheckpointError, match=r"not known: cls\.predictions\.extra\n"):
        AutoModelForMaskedLM.from_pretrained(copied)


def test_convert_and_check_take_encoders(tmp_path):
    lines = []
    published.convert(FOLDERS / "ernie_masked_lm", tmp_path / "ernie", verify=True, say=lines.append)
    assert lines[1].startswith("outputs       the same bits")
    assert any("ErnieForMaskedLM" in line for line in published.check_lines(tmp_path / "ernie"))
    assert any("ErnieForMaskedLM" in line for line in published.show_lines(str(tmp_path / "ernie")))
    assert [*published.show_lines("bert")][1].startswith("architecture  BertModel")
